// What the sleeping device gives to Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device.hpp"
#include "nccl.hpp"
#include "timeline.hpp"

namespace py = pybind11;
using namespace sleeping;

namespace {

struct Graph {
  std::shared_ptr<Captured> captured;
  int64_t stream = 0;
};

constexpr auto kMs = 1e6;

py::list rows() {
  std::vector<Row> log;
  {
    py::gil_scoped_release release;
    log = timeline().log();
  }
  py::list result;
  for (const Row& row : log) {
    py::dict entry;
    entry["name"] = row.name;
    entry["stream"] = row.stream;
    entry["launch_ns"] = row.launch_ns;
    entry["reached_ns"] = row.reached_ns;
    entry["arrival_ns"] = row.arrival_ns;
    entry["begin_ns"] = row.begin_ns;
    entry["end_ns"] = row.end_ns;
    result.append(entry);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(sleeping_bindings, module) {
  module.def("kernel", [](const std::string& name, double ms) {
    timeline().put(current_stream, {name, static_cast<int64_t>(ms * kMs)});
  });
  module.def("log", &rows);
  module.def("counts", &counts);
  module.def("memory", [] {
    const Memory now = memory();
    return py::make_tuple(now.allocated, now.peak, now.allocations);
  });
  module.def("reset_peak", &reset_peak);
  module.def("slow_down", [](double factor) { timeline().slow_down(factor); });
  module.def("skip", [](double ms) { skipped_ns += static_cast<int64_t>(ms * kMs); });
  module.def("now_ns", &now_ns);
  module.def("fail", [] { settings().failing = true; });
  module.def("set_kernel", [](double us) { settings().kernel_ns = static_cast<int64_t>(us * 1e3); });
  module.def("set_link", [](double latency_us, double gb_per_s) {
    settings().latency_ns = static_cast<int64_t>(latency_us * 1e3);
    settings().link_bytes_per_ns = gb_per_s;
  });
  module.def("synchronize", [] {
    py::gil_scoped_release release;
    count("synchronize");
    timeline().wait_all();
  });
  module.def("current_stream", [] { return current_stream; });
  module.def("set_stream", [](int64_t stream) { current_stream = stream; });
  module.def("resize_storage", [](const at::Storage& storage, size_t bytes) {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  });
  module.def("is_capturing", [] { return timeline().is_capturing(current_stream); });

  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def(py::init<>())
      .def("capture_begin",
           [](Graph& graph, int mode) {
             graph.stream = current_stream;
             timeline().begin_capture(current_stream, mode);
           })
      .def("capture_end", [](Graph& graph) { graph.captured = timeline().end_capture(graph.stream); })
      .def("replay",
           [](Graph& graph) {
             if (!graph.captured) throw std::runtime_error("Called CUDAGraph::replay without a preceding capture.");
             timeline().replay(*graph.captured, current_stream);
           })
      .def("reset", [](Graph& graph) { graph.captured.reset(); });

  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "Nccl")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& host, int rank, int size, std::string folder,
                       std::string name) {
        return c10::make_intrusive<Nccl>(host, rank, size, std::move(folder), std::move(name));
      }));
}
