"""What the NNX and the Linen modules share."""
