"""`jaxcap bench`: jaxcap beside whatever attention is installed, on one shape, in one run."""
