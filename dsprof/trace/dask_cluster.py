"""Ranks analyzed by the workers of a Dask cluster.

    with cluster("tcp://10.0.0.1:8786", folder, tell=print) as executor:
        analysis = reports.finish(folder, executor=executor)

Whoever can reach a scheduler can have its workers run code, as Dask sends functions as pickles: on a network that
others share, run it with tls:// and certificates.
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsprof.run import RunFolder

from .cluster_worker import Common, WorkerRefused, call, check, common_with, sentence
from .files import brief

if TYPE_CHECKING:
    import distributed

CONNECT_S: Final = 30
"""A scheduler that does not answer for so long is not there; workers that come later are not waited for."""
PATIENCE_S: Final = 30.0
"""Without a worker for so long, ranks are analyzed in this process. One that its nanny starts again takes some 5 s."""
LOOK_S: Final = 1.0
MISSING: Final = "--dask needs the package `distributed`: pip install 'dsprof[dask]'"
CERTIFICATES: Final = (
    "name the certificates, as Dask has it: DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
    "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT and DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"
)


class ClusterError(Exception):
    """A cluster cannot be used; the message says which, why, and what to do instead."""


@contextmanager
def cluster(address: str, folder: RunFolder, tell: Callable[[str], None]) -> Iterator[Executor]:
    """The workers of a cluster, as an executor. Left by an exception, such as an interrupt, what is left to do is given
    up: what workers write is whole or not there.

    address: of the scheduler (`tcp://host:8786`, `tls://host:8786`), or the path of its scheduler file
    folder:  the run, which the workers must see too
    tell:    told of workers that cannot be used, and why

    Raises ClusterError where there is no cluster, or no worker of it can be used.
    """
    try:
        import distributed
    except ImportError:
        raise ClusterError(MISSING) from None
    log = logging.getLogger("distributed")
    level = log.level
    log.setLevel(logging.CRITICAL)  # what is wrong is said in our own words
    try:
        client = _connect(distributed, address)
        executor = ClusterExecutor(client, address, common_with(folder), tell)
        try:
            executor.find_workers()
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            executor.shutdown()
            with suppress(Exception):  # a cluster that is gone
                client.close(timeout=CONNECT_S)
    finally:
        log.setLevel(level)


def _connect(distributed: Any, address: str) -> distributed.Client:
    where = {"scheduler_file": address} if Path(address).is_file() else {"address": address}
    client: distributed.Client | None = None
    try:
        client = distributed.Client(**where, timeout=CONNECT_S, set_as_default=False)
        client.wait_for_workers(1, timeout=CONNECT_S)
    except Exception as error:  # each kind of address has its own
        if client is not None:
            client.close(timeout=1)
        if isinstance(error, TypeError):  # Dask's own word where a connection has to be encrypted
            raise ClusterError(f"{address}: {brief(error)}; {CERTIFICATES}") from error
        raise ClusterError(
            f"{address}: no scheduler with workers answers there ({brief(error)}); see that `dask scheduler` and "
            "`dask worker` run, and that this host can reach them"
        ) from error
    return client


class ClusterExecutor(Executor):
    """The workers of a cluster that see the run and have the same code.

    The first argument of what is submitted goes to the cluster once, however often it is submitted: it holds what the
    tasks have in common. A task whose worker is lost is done by another; where none is left, it fails.
    """

    def __init__(
        self,
        client: distributed.Client,
        address: str,
        common: Common,
        tell: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client, self._address, self._common, self._tell = client, address, common, tell
        self._patience_s = patience_s
        self._known: dict[str, str] = {}
        """Worker -> why it is refused; empty: it is not."""
        self._sent: tuple[Any, Any] = (None, None)
        self._pending: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._failed: list[str] = []
        """Why tasks failed, of each that did."""
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._fail_without_workers, name="dsprof-cluster", daemon=True)

    def find_workers(self) -> None:
        """Look at the workers that are not known yet. Raises ClusterError where none can be used."""
        new = sorted(self._client.nthreads().keys() - self._known.keys())
        if new:
            refused = []
            for worker, said in self._client.run(check, self._common, workers=new, on_error="return").items():
                self._known[worker] = _why(said)
                if self._known[worker]:
                    refused.append((worker, self._known[worker]))
            if refused and any(not why for why in self._known.values()):
                self._tell(f"left out: {sentence(refused)}")
        if all(self._known.values()):
            said = sentence([*self._known.items()]) if self._known else "there are none"
            raise ClusterError(f"{self._address}: no worker can be used: {said}")

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises RuntimeError where the executor was shut down or the cluster is gone."""
        if self._closed.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        first, *rest = args
        try:
            if self._sent[0] is not first:
                self._send(first)
            inner = self._client.submit(
                call, self._common, function, self._sent[1], *rest, **kwargs, workers=self._usable(), pure=False
            )
        except (OSError, ValueError) as error:  # the scheduler is gone, or all workers are
            self._failed.append(f"{type(error).__name__}: {brief(error)}")
            raise BrokenExecutor(f"{self._address}: {error}") from error
        if not self._watch.is_alive():
            self._watch.start()
        return self._outer(inner)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._failed and not self._closed.is_set():
            tasks = f"{len(self._failed)} task{'s' * (len(self._failed) > 1)}"
            self._tell(
                f"{self._address}: {tasks} failed there, so their ranks were analyzed in this process "
                f"({self._failed[0]})"
            )
        self._closed.set()
        self._sent = (None, None)
        for future in [*self._pending] if cancel_futures else ():
            future.cancel()

    def _send(self, first: Any) -> None:
        """Have every worker hold it, so that it is there when one of them is lost."""
        try:
            self.find_workers()
        except ClusterError as error:
            self._failed.append(str(error))
            raise BrokenExecutor(str(error)) from error
        packed = pickle.dumps(first, pickle.HIGHEST_PROTOCOL)
        there = [worker for worker in self._client.nthreads() if not self._known.get(worker, "unknown")]
        self._sent = first, self._client.scatter(packed, workers=there, broadcast=True, hash=False)

    def _usable(self) -> list[str]:
        """Workers; and where all of a host can be used the host, as one that is started again there has a new port."""
        by_host: dict[str, list[str]] = {}
        for worker in self._known:
            by_host.setdefault(_host(worker), []).append(worker)
        found: list[str] = []
        for host, workers in by_host.items():
            good = [worker for worker in workers if not self._known[worker]]
            found += [host] if len(good) == len(workers) else good
        return found

    def _outer(self, inner: distributed.Future) -> Future[Any]:
        """A future of this module's kind, whose result is unpacked."""
        outer: Future[Any] = Future()
        self._pending.add(outer)

        def fail(why: BaseException) -> None:
            outer.set_exception(why)
            self._failed.append(f"{type(why).__name__}: {brief(why)}")

        def done(of: distributed.Future) -> None:
            with suppress(InvalidStateError):  # given up meanwhile
                if of.status == "finished":
                    try:
                        outer.set_result(pickle.loads(of.result()))
                    except Exception as error:  # it is lost on the way
                        fail(error)
                else:
                    why = None if of.status == "cancelled" else of.exception()
                    fail(why or BrokenExecutor(f"the cluster gave it up ({of.status})"))

        def give_up(of: Future[Any]) -> None:
            if of.cancelled():
                with suppress(Exception):  # a cluster that is gone
                    inner.cancel()

        outer.add_done_callback(give_up)
        inner.add_done_callback(done)
        return outer

    def _fail_without_workers(self) -> None:
        """Fail what is pending when no worker was there for too long: the scheduler would wait for one for ever."""
        without_s = 0.0
        while not self._closed.wait(LOOK_S):
            try:
                there = [*self._client.nthreads()]
            except Exception:  # the scheduler is gone, too
                there = []
            usable = set(self._usable())
            lost = not any(worker in usable or _host(worker) in usable for worker in there)
            without_s = without_s + LOOK_S if lost else 0.0
            if without_s >= self._patience_s:
                for outer in [*self._pending]:
                    with suppress(InvalidStateError):
                        outer.set_exception(BrokenExecutor("no worker is left"))
                        self._failed.append("no worker is left")


def _why(said: Any) -> str:
    """Why a worker is refused that answered this; empty: it is not."""
    if said is None:
        return ""
    if isinstance(said, WorkerRefused):
        return str(said)
    if isinstance(said, (ImportError, AttributeError)):
        return f"it has no dsprof, or an older one ({said}); install the same one as here on all workers"
    return f"it does not answer as it should ({type(said).__name__}: {said})"


def _host(worker: str) -> str:
    """`10.0.0.3` of `tcp://10.0.0.3:4567`."""
    return worker.partition("://")[2].rpartition(":")[0].strip("[]")
