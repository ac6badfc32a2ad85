"""Many ranks in one process: each is a thread of torch's own simulated process group.

torch's LocalTensorMode does not do here: its local tensor is a wrapper, a ShardTensor is the local
tensor itself, and one flow of control cannot take what each rank does with its own sizes.
Randomness is one for all threads: draw from generators of your own.
"""

import threading
import traceback

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def simulate(size, job, *args):
    """What the job returns on every rank, by rank.

    Raises:
        AssertionError: with the traceback of the first rank that raised.
    """
    store, results, errors = HashStore(), [None] * size, []

    def rank(number):
        try:
            dist.init_process_group("threaded", rank=number, world_size=size, store=store)
            results[number] = job(*args)
        except BaseException as error:
            errors.append(f"rank {number}:\n{traceback.format_exc()}")
            threaded.ProcessLocalGroup.exception_handle(error)  # the others stop waiting

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        ranks = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        torch.set_num_threads(threads)
    assert not errors, errors[0]
    return results
