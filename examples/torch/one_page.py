"""jaxcap in PyTorch on one page: a capped attention layer, trained on a toy task, then as a module.

    python -m examples.torch.one_page

Runs on a CPU, and on a GPU where there is one. The task: repeat the token of four positions ago.
"""

import torch
from torch import nn

from jaxcap import torch_bridge

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 64, 64, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = torch_bridge.DotProductAttention(
            softcap=50.0, causal=True, window_size=(15, -1)
        )
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.tokens(ids) + place
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        )  # [batch, length, heads, size]
        return self.out(self.attend(q, k, v).flatten(2))


def train(steps: int = 300) -> float:
    """The last loss; a guess is log(32) = 3.5."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(0.0)
    for step in range(steps):
        ids = torch.randint(VOCABULARY, (16, LENGTH), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(ids)[:, 4:]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, :-4].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    print(f"last loss {train():.3f}")
