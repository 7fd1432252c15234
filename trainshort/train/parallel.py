"""Training on several processes: communication between the ranks, and distributed models.

The training loop is the same for one process and for many processes. A `World` computes sums over all ranks. A
`DistributedModel` synchronizes weights and gradients. With one process, both do nothing.

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

# If a collective operation takes longer, another rank has failed. Without a limit, this rank would wait forever.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)

# How long the other ranks wait while rank 0 prepares the data. If rank 0 fails, torchrun ends the other ranks.
DATA_PREPARATION_TIMEOUT = timedelta(days=1)

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """All processes (ranks) that train a model together, as seen by one of them.

    Attributes:
        rank: The number of this process, from 0 to `size - 1`.
        size: The number of processes.
        nodes: The number of machines.
        device: The device of this process.
        store: The key-value store that the processes share, or None if there is only one process.
    """

    rank: int = 0
    size: int = 1
    nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Store | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this process is rank 0. Only rank 0 writes to the run folder."""
        return self.rank == 0

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks (processes that train together), in float64.

        Args:
            values: The values of this rank. All ranks must pass the same number of values.

        Returns:
            One list for each rank. For example, if rank 0 passes [1.0] and rank 1 passes [2.0], both get
            [[1.0], [2.0]].
        """
        if self.size == 1:
            return [values]
        own_row = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own_row) for _ in range(self.size)]
        dist.all_gather(rows, own_row)
        return [row.tolist() for row in rows]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Return the sum of each value over all ranks. Sums of integers are exact up to 2^53.

        Args:
            values: The values of this rank. All ranks must pass the same number of values.
        """
        rows = self.all_gather(values)
        return [sum(column) for column in zip(*rows, strict=True)]

    def all_gather_objects(self, value: Result) -> list[Result]:
        """Return a list with one value from each rank (process). The values can be any objects that can be pickled.

        This method is slower than `all_gather`.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def run_on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Call a function on every rank (process). If the function fails on one rank, all ranks raise an error.

        Without this method, the other ranks would wait for the failed rank in the next collective operation.

        Args:
            work: The function to call.

        Returns:
            The result of `work` on this rank.

        Raises:
            InputError: If `work` raised an `InputError` on any rank.
        """
        own_error = None
        result = None
        try:
            result = work()
        except InputError as error:
            own_error = error
        own_flag = float(own_error is not None)  # 1.0 if `work` has failed on this rank, otherwise 0.0.
        flags_by_rank = self.all_gather([own_flag])
        if own_error is not None:
            raise own_error
        failed_ranks = [rank for rank, (flag,) in enumerate(flags_by_rank) if flag]
        if failed_ranks:
            raise InputError(f"Rank {failed_ranks[0]} has failed. See the error message of that rank.")
        return result  # pyright: ignore[reportReturnType]  (`work` did not fail, so there is a result.)

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Call a function on rank 0 only. If the function fails, all ranks raise an error.

        Args:
            work: The function to call.

        Returns:
            The result of `work` on rank 0, and None on all other ranks.

        Raises:
            InputError: If `work` raised an `InputError`.
        """

        def do_nothing() -> None:
            """Take the place of `work` on all ranks except rank 0."""

        return self.run_on_all_ranks(work if self.is_main else do_nothing)

    def broadcast_from_rank0(self, work: Callable[[], Result]) -> Result:
        """Call a function on rank 0 and return its result on all ranks.

        Use this method to read files that may change. Otherwise the ranks could read different contents.

        Args:
            work: The function to call. Its result must be an object that can be pickled.

        Raises:
            InputError: If `work` raised an `InputError`.
        """
        # `run_on_main` returns None on all ranks except rank 0.
        results_by_rank = self.all_gather_objects(self.run_on_main(work))
        return results_by_rank[0]

    def rank0_first(self, name: str, work: Callable[[], Result]) -> Result:
        """Call a function on rank 0, and then on the other ranks.

        Use this method for work whose result is stored on the disk. The other ranks then read the stored result.

        Args:
            name: A key in the shared store. Each call must use another key.
            work: The function to call.

        Returns:
            The result of `work` on this rank.

        Raises:
            InputError: If `work` raised an `InputError`.
        """
        if self.store is None:
            return work()
        if self.is_main:
            try:
                result = work()
            except InputError as error:
                self.store.set(name, str(error))
                raise
            self.store.set(name, "")  # An empty message tells the other ranks that rank 0 has succeeded.
            return result

        self.store.wait([name], DATA_PREPARATION_TIMEOUT)
        error_message = self.store.get(name).decode()
        if error_message:
            raise InputError(error_message)
        return work()


@contextmanager
def init_distributed() -> Iterator[World]:
    """Context manager: initialize torch.distributed if torchrun started several processes.

    Yields:
        The ranks that train together. Without torchrun, there is only one rank.
    """
    rank = get_rank()
    size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return

    store = _connect_store(rank, size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        nodes = size // ranks_per_node
        yield World(rank=rank, size=size, nodes=nodes, device=device, store=PrefixStore("trainshort", store))
    finally:
        # These lines avoid a deadlock. The threads of gloo need Python's global lock to free the tensors of the last
        # operation. Destroying the process group waits for these threads. The reducer of DDP also waits for them while
        # it holds the global lock. Therefore reducers are freed first, and the threads get some time to finish.
        gc.collect()
        time.sleep(0.1)
        dist.destroy_process_group()


def _connect_store(rank: int, size: int) -> Store:
    """Connect to the key-value store through which the ranks exchange their addresses.

    torchrun keeps the store when it restarts the ranks after a failure. The store then still contains the addresses of
    the failed ranks. Therefore each restart uses keys with another prefix.

    Args:
        rank: The number of this process.
        size: The number of processes.
    """
    # If torchrun runs the store, no rank may start another one.
    uses_torchrun_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0 and not uses_torchrun_store,
        timeout=COLLECTIVE_TIMEOUT,
    )
    store_of_restart = PrefixStore(f"restart-{restart_count()}", store)
    # A process may train several runs, one after the other. Each run uses keys with another prefix.
    # `add` increases a counter in the store, and returns its new value.
    run_number = store_of_restart.add(f"joins-of-{rank}", 1)
    return PrefixStore(f"join-{run_number}", store_of_restart)


def get_rank() -> int:
    """Return the rank of this process. The function also works before torch.distributed is initialized."""
    return int(os.environ.get("RANK", 0))


def restart_count() -> int:
    """Return how often torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@dataclass(frozen=True)
class DistributedModel:
    """A model that all ranks train together: replicated (ddp), sharded (fsdp, hsdp), or on a single process.

    Attributes:
        model: The model. Its parameters have the same names with every strategy.
        forward: The function to call instead of the model. It also synchronizes weights and gradients.
        no_sync: Returns a context manager in which gradients are not synchronized. It is used for all micro-batches
            except the last one.
        sharded: Whether each rank holds only a shard of each parameter.
    """

    model: nn.Module
    forward: Callable[..., Any]
    no_sync: Callable[[], AbstractContextManager]
    sharded: bool = False


def wrap_model(model: Any, world: World, strategy: str, *, bfloat16: bool = False) -> DistributedModel:
    """Prepare a model for training on all ranks. Gradients are averaged over the ranks.

    Args:
        model: The model. It must have the attribute `layers`.
        world: The ranks that train together.
        strategy: "ddp" replicates the model on all ranks. "fsdp" shards the model over all ranks. "hsdp" shards the
            model over the ranks of a machine and replicates it on all machines.
        bfloat16: Whether sharded models compute in bfloat16. Gradients are still summed in float32.
    """
    if world.size == 1:
        return DistributedModel(model, model, nullcontext)
    if strategy == "ddp":
        ddp_model = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        return DistributedModel(model, ddp_model, ddp_model.no_sync)
    return _shard_model(model, world, strategy, bfloat16=bfloat16)


def _shard_model(model: Any, world: World, strategy: str, *, bfloat16: bool) -> DistributedModel:
    """Shard the parameters of a model with FSDP. The parameters of a layer are gathered when they are needed.

    Args:
        model: The model. It must have the attribute `layers`.
        world: The ranks that train together.
        strategy: "fsdp" or "hsdp", see `wrap_model`.
        bfloat16: Whether to compute in bfloat16.
    """
    # These imports are slow, and only sharded models need them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if strategy == "hsdp":
        mesh_shape = (world.nodes, world.size // world.nodes)
        dimension_names = ("replicate", "shard")
    else:
        mesh_shape = (world.size,)
        dimension_names = ("shard",)
    mesh = init_device_mesh(world.device.type, mesh_shape, mesh_dim_names=dimension_names)

    # With None, FSDP computes and sums in the data type of the parameters.
    param_dtype = torch.bfloat16 if bfloat16 else None
    reduce_dtype = torch.float32 if bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # All parameters outside the layers form one group. So the input embedding and the output matrix can share a tensor.
    fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def no_sync() -> Iterator[None]:
        """Context manager: do not average the gradients of the ranks inside the block.

        The gradients of several micro-batches are added up first, and averaged once.
        """
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    return DistributedModel(model, model, no_sync, sharded=True)


def bfloat16_unsupported_reason(device: torch.device) -> str | None:
    """Return why bfloat16 is not faster than float32 on a device, as a clause, or None if bfloat16 is faster."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return None
        return "this GPU has no bfloat16 units"
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return None
    return "this processor has no bfloat16 instructions"
