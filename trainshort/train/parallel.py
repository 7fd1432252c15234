"""One process or many: who I am, how gradients meet, how weights are shared out.

The training loop is written once. It asks a `World` for sums over the ranks, and a `Replica` for losses and for the
moment at which gradients are exchanged; with one process both do nothing.

    torchrun --nproc_per_node=2 -m trainshort train RECIPE --parallel fsdp
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainshort.errors import InputError

TIMEOUT = timedelta(minutes=10)
"""A collective that takes longer has lost a partner; without a limit the survivors would wait for ever."""

DATA_PREPARATION_TIMEOUT = timedelta(days=1)
"""The other ranks' patience while rank 0 prepares data; should rank 0 die, torchrun ends them."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process among its equals."""

    rank: int = 0
    size: int = 1
    nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store | None = None

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's values, in float64: rank 0 gives [1.0] and rank 1 gives [2.0], both get [[1.0], [2.0]]."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks; integers below 2^53 stay exact."""
        return [sum(column) for column in zip(*self.all_gather(values), strict=True)]

    def all_gather_objects(self, value: Result) -> list[Result]:
        """Every rank's value, of any kind; for what is rare and small."""
        values: list[Any] = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value)
        return values

    def run_on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run `work` on each rank; if it fails on one it fails on all, so that nobody waits for a rank that gave up."""
        failure, result = None, None
        try:
            result = work()
        except InputError as error:
            failure = error
        failed = [rank for rank, (flag,) in enumerate(self.all_gather([float(failure is not None)])) if flag]
        if failure is not None:
            raise failure
        if failed:
            raise InputError(f"Rank {failed[0]} could not go on; its message says why.")
        return result  # pyright: ignore[reportReturnType]  (it did not fail, so there is one)

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 only; if it fails there, it fails on all."""
        return self.run_on_all_ranks(work if self.main else lambda: None)

    def broadcast_from_rank0(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on rank 0, on every rank: for what each would look up on a disk that changes meanwhile."""
        return self.all_gather_objects(self.on_main(work))[0]

    def rank0_first(self, name: str, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0, and on the others when it has finished there (they find what it left on disk)."""
        if self.store is None:
            return work()
        if self.main:
            try:
                result = work()
            except InputError as error:
                self.store.set(name, str(error))
                raise
            self.store.set(name, "")
            return result
        self.store.wait([name], DATA_PREPARATION_TIMEOUT)
        if failure := self.store.get(name).decode():
            raise InputError(failure)
        return work()


@contextmanager
def init_distributed() -> Iterator[World]:
    """Join the ranks that torchrun started, or be alone; leave them at the end."""
    rank, size = get_rank(), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    store = _store(rank, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        nodes = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield World(rank=rank, size=size, nodes=nodes, device=device, store=PrefixStore("trainshort", store))
    finally:
        # gloo's threads drop the tensors of the last exchange when they get Python's lock. Whoever drops the group
        # itself waits for those threads, and DDP's reducer does so without giving up the lock. So reducers go first,
        # then the threads get time to finish. (Without this, runs on two ranks were seen to hang here.)
        gc.collect()
        time.sleep(0.1)
        dist.destroy_process_group()


def _store(rank: int, size: int) -> Store:
    """The ranks' meeting point.

    torchrun keeps its store when it restarts the ranks after one was killed, and what the dead ranks wrote there would
    be taken for the new ones' addresses: the restarted job hangs. So each restart meets under a name of its own.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not agent,
        timeout=TIMEOUT,
    )
    restart = PrefixStore(f"restart-{restart_count()}", store)
    # A process may train twice: each time it joins anew, and so do the others, under the next number.
    return PrefixStore(f"join-{restart.add(f'joins-of-{rank}', 1)}", restart)


def get_rank() -> int:
    """This process's number, before and after the time it is joined to others."""
    return int(os.environ.get("RANK", 0))


def restart_count() -> int:
    """How often torchrun has restarted this job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass(frozen=True)
class DistributedModel:
    """A model that is trained by all ranks at once: replicated (ddp), sharded (fsdp, hsdp), or simply here.

    `model` keeps its parameters under their own names whatever wraps it; `forward` is to be called in its place,
    because the exchange of weights and gradients hangs on that call.
    """

    model: nn.Module
    forward: Callable[..., Any]
    no_sync: Callable[[], AbstractContextManager]
    """Around forward and backward of every micro-batch but the last, after which the ranks exchange gradients."""
    sharded: bool = False


def wrap_model(model: Any, world: World, strategy: str, *, half: bool = False) -> DistributedModel:
    """Prepare `model` for training by all ranks; `half` computes in bfloat16 and still sums gradients in float32.

    The ranks' gradients are averaged, by all three strategies.
    """
    if world.size == 1:
        return DistributedModel(model, model, nullcontext)
    if strategy == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        return DistributedModel(model, wrapped, wrapped.no_sync)
    return _shard(model, world, strategy, half=half)


def _shard(model: Any, world: World, strategy: str, *, half: bool) -> DistributedModel:
    """Give each rank a part of every block's weights; a block is gathered when it is needed, then let go."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, names = ((world.size,), ("shard",))
    if strategy == "hsdp":
        shape, names = ((world.nodes, world.size // world.nodes), ("replicate", "shard"))
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Everything that is not in a block, and so both ends of a tied embedding, is one group: they stay one tensor.
    fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def hold() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return DistributedModel(model, model, hold, sharded=True)


def bfloat16_unsupported_reason(device: torch.device) -> str | None:
    """Why bfloat16 would not be faster here, or None where it is."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return None if fast else "this GPU has no bfloat16 units"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return None if fast else "this processor has no bfloat16 instructions"
