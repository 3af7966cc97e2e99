"""trainers.py lightning|accelerate: the framework's own training loop with DDP, on backend "tandem" and CPU ranks,
has the losses and weights that it has on gloo. Exits with CTest's skip code where the framework is not installed."""
import importlib.util
import os
import sys

from group import FOLDER, RANK, SIZE, dist, tandem, torch

EPOCHS, ROWS, BATCH, WIDTH = 2, 64, 8, 12


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, 1))


def make_loader():
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(50))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh()), BATCH)


def start_gloo():
    os.makedirs(FOLDER, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/gloo", rank=RANK, world_size=SIZE)


def train_lightning(backend):
    """Losses of this rank, the weights, and the averages that the trainer logs."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = make_model(), []

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)  # averages integers, too
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    if backend == "gloo":
        start_gloo()
    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend=backend),
                                max_epochs=EPOCHS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False)
    trainer.fit(module, make_loader())
    return module.losses, list(module.parameters()), [float(trainer.callback_metrics["loss"])]


def train_accelerate(backend):
    """As train_lightning; the averages are those of gather_for_metrics."""
    import accelerate

    if backend == "gloo":
        start_gloo()
    else:
        dist.init_process_group("tandem")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), make_loader())
    losses, averages = [], []
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()))
            averages.append(float(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()))
    return losses, list(model.parameters()), averages


def main():
    framework = sys.argv[1]
    if importlib.util.find_spec(framework) is None:
        print(f"skipped: {framework} is not installed: make test-torch fetches it", flush=True)
        sys.exit(77)
    train = {"lightning": train_lightning, "accelerate": train_accelerate}[framework]
    found = {}
    for backend in ("gloo", "tandem"):
        losses, weights, averages = train(backend)
        assert dist.get_backend() == backend and dist.get_world_size() == SIZE, dist.get_backend()
        found[backend] = torch.tensor(losses), torch.cat([x.detach().flatten() for x in weights]), torch.tensor(averages)
        if backend == "tandem":
            assert tandem.torch.bytes_sent() > 4 * found[backend][1].numel(), tandem.torch.bytes_sent()
        dist.destroy_process_group()
    assert len(found["gloo"][0]) == EPOCHS * ROWS // BATCH // SIZE, len(found["gloo"][0])
    for got, want in zip(found["tandem"], found["gloo"]):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    losses = found["tandem"][0]
    assert losses[-1] < 0.8 * losses[0], losses
    print(f"ok: rank {RANK}: {framework}: loss {losses[-1]:.5f}", flush=True)


if __name__ == "__main__":
    main()
