"""CUDA tensors of process groups, on a fake device: torch for CPU has none."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from mooncake import _pg_work  # noqa: E402


class Stream:
    """Stream that runs its queue when it is waited for, as late as a device may."""

    def __init__(self):
        self._queue = []

    def queue(self, work):
        self._queue.append(work)

    def run(self):
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def wait_stream(self, other):
        self.queue(other.run)


class Device:
    """Device with a current stream."""

    type, index = "cuda", 0

    def __init__(self):
        self.default = self.current = Stream()

    def current_stream(self, device=None):
        assert device in (None, self)
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class DeviceTensor:
    """Tensor on the fake device. Operations are queued on the current stream."""

    layout, is_quantized, is_cpu = torch.strided, False, False

    def __init__(self, device, values):
        self.device, self.values = device, torch.tensor(values)

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def to(self, device):
        assert device == "cpu"
        self.device.current.run()
        return self.values.clone()

    def is_contiguous(self):
        return True

    def copy_(self, host):
        self.device.current.queue(lambda: self.values.copy_(host))

    def add_(self, number):
        self.device.current.queue(lambda: self.values.add_(number))

    def read(self):
        return self.to("cpu").tolist()


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    return device


def test_an_operation_takes_what_the_stream_of_the_caller_has_computed(device):
    tensor = DeviceTensor(device, [1, 2])
    staging = _pg_work._Staging()
    other = Stream()
    with device.stream(other):
        tensor.add_(10)
        host = staging.input(tensor)
    assert host.tolist() == [11, 12]
    assert not staging.copies_back


def test_results_come_in_the_order_of_the_stream_of_the_call(device):
    tensor = DeviceTensor(device, [1, 2])
    staging = _pg_work._Staging()
    of_call = Stream()
    with device.stream(of_call):
        tensor.add_(10)
        host = staging.output(tensor)
    assert host.tolist() == [11, 12], "slots of absent ranks keep their elements"
    host.mul_(2)
    # The operation ends on another thread, under another stream.
    staging.finish()
    with device.stream(of_call):
        tensor.add_(1)
        assert tensor.read() == [23, 25], "the copy comes before what the caller queues later"


def test_a_waiter_sees_the_results_on_its_own_stream(device):
    tensor = DeviceTensor(device, [1, 2])
    staging = _pg_work._Staging()
    with device.stream(Stream()):
        host = staging.output(tensor)
    host.mul_(5)
    waiter = Stream()
    with device.stream(waiter):
        staging.finish()
        assert tensor.read() == [5, 10], "the stream of the waiter waits for that of the call"


def test_results_are_copied_back_once(device):
    tensor = DeviceTensor(device, [3])
    staging = _pg_work._Staging()
    host = staging.output(tensor)
    host.mul_(2)
    staging.finish()
    tensor.add_(1)
    staging.finish()
    assert tensor.read() == [7]
