// A CUDA device that is not there, for a torch without CUDA: streams that are busy for as long as they are told, events
// that are over when their stream has got to them, and counts of what it is asked. It stands in torch's registry of
// devices, where `c10::Event` and the guards find it.

#include <Python.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::mutex mutex;
std::map<c10::StreamId, double> busy_until;
std::map<std::string, int> counts;
std::atomic<bool> failing{false};
thread_local c10::StreamId current = 0;
const c10::Device device(c10::DeviceType::CUDA, 0);

void count(const char* what) {
  std::lock_guard<std::mutex> lock(mutex);
  counts[what]++;
}

double reached(c10::StreamId stream) { return std::max(now_ms(), busy_until[stream]); }

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, device, current); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, std::exchange(current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    count("record");
    if (failing) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    if (!*event) *event = new double(0);
    std::lock_guard<std::mutex> lock(mutex);
    *static_cast<double*>(*event) = reached(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(mutex);
    busy_until[stream.id()] = std::max(busy_until[stream.id()], *static_cast<double*>(event));
  }
  bool queryEvent(void* event) const override {
    count("query");
    return !event || now_ms() >= *static_cast<double*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    count("elapsed");
    // As CUDA tells it: in single precision.
    return static_cast<float>(*static_cast<double*>(second) - *static_cast<double*>(first));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void synchronizeEvent(void*) const override { count("synchronize"); }
  void synchronizeStream(const c10::Stream&) const override { count("synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { count("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

}  // namespace

PYBIND11_MODULE(fake_device, module) {
  module.def("launch", [](double ms) {
    std::lock_guard<std::mutex> lock(mutex);
    busy_until[current] = reached(current) + ms;
  });
  module.def("use_stream", [](int64_t stream) { current = stream; });
  module.def("wait_for", [](int64_t stream) {  // the current stream does
    std::lock_guard<std::mutex> lock(mutex);
    busy_until[current] = std::max(busy_until[current], busy_until[stream]);
  });
  module.def("fail", [] { failing = true; });
  module.def("counts", [] {
    pybind11::dict found;
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [name, number] : counts) found[name.c_str()] = number;
    return found;
  });
  module.def("drain", [] {  // what the job itself waits for
    double until = 0;
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (const auto& [stream, busy] : busy_until) until = std::max(until, busy);
    }
    pybind11::gil_scoped_release release;
    while (now_ms() < until) std::this_thread::sleep_for(std::chrono::microseconds(200));
  });
}
