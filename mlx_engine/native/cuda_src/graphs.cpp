// Records what MLX puts on the GPU for a step, as a CUDA graph, and runs it again without MLX: building the same few
// hundred nodes anew costs the host more than the GPU needs for them.
//
// MLX's CUDA backend collects the kernels of an evaluation in a graph before it launches them. A recording takes a copy of
// that graph, ready to launch, and holds on to all memory that its kernels use. Inputs and outputs are arrays whose
// memory stays: the host writes to the inputs before each launch.

#include <cuda.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cuda/device.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/transforms.h"

namespace mx = mlx::core;
namespace nb = nanobind;

namespace quire {
namespace {

// Names private members of MLX's encoder: explicit instantiation is where C++ lets one do that.
template <auto Member, typename Tag>
struct Expose {
  friend auto exposed(Tag) { return Member; }
};
#define QUIRE_EXPOSE(Tag, member)                                 \
  struct Tag {                                                    \
    friend auto exposed(Tag);                                     \
  };                                                              \
  template struct Expose<&mx::cu::CommandEncoder::member, Tag>;
QUIRE_EXPOSE(Graph, graph_)
QUIRE_EXPOSE(FromNodes, from_nodes_)
QUIRE_EXPOSE(ToNodes, to_nodes_)
QUIRE_EXPOSE(Temporaries, temporaries_)
QUIRE_EXPOSE(MaxOps, max_ops_per_graph_)
QUIRE_EXPOSE(MaxMegabytes, max_mb_per_graph_)
#undef QUIRE_EXPOSE

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    const char* words = nullptr;
    cuGetErrorString(result, &words);
    throw std::runtime_error(std::string(what) + ": " + (words != nullptr ? words : "unknown error"));
  }
}

mx::Stream gpu_stream() { return mx::default_stream(mx::Device::gpu); }

mx::cu::CommandEncoder& encoder() { return mx::cu::get_command_encoder(gpu_stream()); }

CUstream cuda_stream() { return reinterpret_cast<CUstream>(static_cast<cudaStream_t>(encoder().stream())); }

CUdeviceptr device_address(const mx::array& array) {
  return reinterpret_cast<CUdeviceptr>(mx::gpu_ptr<char>(array));
}

bool is_kernel(CUgraphNode node) {
  CUgraphNodeType type;
  check(cuGraphNodeGetType(node, &type), "a node's type");
  return type == CU_GRAPH_NODE_TYPE_KERNEL;
}

// Whether a node is a kernel that waits itself for those before it: one of ours, see QUIRE_AWAIT_PREVIOUS.
bool awaits_previous(CUgraphNode node) {
  if (!is_kernel(node)) {
    return false;
  }
  CUDA_KERNEL_NODE_PARAMS params = {};
  check(cuGraphKernelNodeGetParams(node, &params), "a kernel's parameters");
  const char* name = nullptr;
  if (params.func != nullptr) {
    check(cuFuncGetName(&name, params.func), "a kernel's name");
  } else if (params.kern != nullptr) {
    check(cuKernelGetName(&name, params.kern), "a kernel's name");
  }
  return name != nullptr && std::strstr(name, "custom_kernel_quire_") != nullptr;
}

bool starts_kernels_early() {
  CUdevice device;
  int major = 0;
  check(cuCtxGetDevice(&device), "the device");
  check(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "the compute capability");
  return major >= 9;
}

class Recording {
 public:
  explicit Recording(bool overlaps) : overlaps_(overlaps) {}
  Recording(const Recording&) = delete;
  ~Recording() {
    if (graph_ != nullptr) {
      cuGraphExecDestroy(graph_);
    }
  }

  // Called while MLX evaluates the last array of the step: all its kernels are in the encoder's graph.
  void take(mx::cu::CommandEncoder& from) {
    auto* graph = reinterpret_cast<CUgraph>(static_cast<cudaGraph_t>(from.*exposed(Graph{})));
    auto& sources = from.*exposed(FromNodes{});
    auto& targets = from.*exposed(ToNodes{});
    if (!sources.empty()) {
      // The encoder would add them when it launches the graph.
      const auto edges = edge_kinds(sources, targets);
      check(cuGraphAddDependencies(graph, reinterpret_cast<CUgraphNode*>(sources.data()),
                                   reinterpret_cast<CUgraphNode*>(targets.data()), edges.data(), sources.size()),
            "the graph's dependencies");
      sources.clear();
      targets.clear();
    }
    check(cuGraphGetNodes(graph, nullptr, &num_nodes_), "the graph's nodes");
    check(cuGraphInstantiateWithFlags(&graph_, graph, 0), "instantiating the graph");
    kept_ = from.*exposed(Temporaries{});
  }

  void keep(const mx::array& array) { kept_.push_back(array.data_shared_ptr()); }

  void launch() {
    if (graph_ == nullptr) {
      throw std::runtime_error("nothing has been recorded");
    }
    // What MLX has collected comes first.
    encoder().commit();
    check(cuGraphLaunch(graph_, cuda_stream()), "launching a recorded graph");
  }

  size_t num_nodes() const { return num_nodes_; }
  size_t num_early_starts() const { return num_early_starts_; }

 private:
  // A kernel of ours may start while those before it still run, if those are all kernels.
  template <typename Nodes>
  std::vector<CUgraphEdgeData> edge_kinds(const Nodes& sources, const Nodes& targets) {
    std::vector<CUgraphEdgeData> edges(sources.size(), CUgraphEdgeData{});
    if (!overlaps_ || !starts_kernels_early()) {
      return edges;
    }
    std::unordered_map<void*, bool> early;
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto [found, is_new] = early.try_emplace(targets[i], false);
      if (is_new) {
        found->second = awaits_previous(reinterpret_cast<CUgraphNode>(targets[i]));
      }
      found->second = found->second && is_kernel(reinterpret_cast<CUgraphNode>(sources[i]));
    }
    for (size_t i = 0; i < sources.size(); ++i) {
      if (early[targets[i]]) {
        edges[i].from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        edges[i].type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
      }
    }
    for (const auto& [_, starts_early] : early) {
      num_early_starts_ += starts_early;
    }
    return edges;
  }

  CUgraphExec graph_ = nullptr;
  bool overlaps_;
  size_t num_nodes_ = 0;
  size_t num_early_starts_ = 0;
  std::vector<std::shared_ptr<mx::array::Data>> kept_;
};

class Record : public mx::Primitive {
 public:
  Record(mx::Stream stream, std::shared_ptr<Recording> recording)
      : mx::Primitive(stream), recording_(std::move(recording)) {}

  const char* name() const override { return "Record"; }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("Record runs on CUDA only");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].copy_shared_buffer(inputs[0]);
    recording_->take(mx::cu::get_command_encoder(stream()));
    recording_->keep(inputs[0]);
  }

 private:
  std::shared_ptr<Recording> recording_;
};

// While one lives, MLX puts all it evaluates into one graph.
class OneGraph {
 public:
  OneGraph() : encoder_(encoder()) {
    encoder_.commit();
    std::swap(max_ops_, encoder_.*exposed(MaxOps{}));
    std::swap(max_megabytes_, encoder_.*exposed(MaxMegabytes{}));
  }
  ~OneGraph() {
    std::swap(max_ops_, encoder_.*exposed(MaxOps{}));
    std::swap(max_megabytes_, encoder_.*exposed(MaxMegabytes{}));
  }

 private:
  mx::cu::CommandEncoder& encoder_;
  int max_ops_ = INT_MAX;
  int max_megabytes_ = INT_MAX;
};

// Runs `build`, which gives a lazy array, evaluates that, and returns the recording. With `overlaps` kernels of ours start
// while those before them end.
std::shared_ptr<Recording> record(const nb::callable& build, bool overlaps) {
  auto recording = std::make_shared<Recording>(overlaps);
  auto output = nb::cast<mx::array>(build());
  mx::array recorded(output.shape(), output.dtype(), std::make_shared<Record>(gpu_stream(), recording), {output});
  {
    OneGraph one_graph;
    mx::eval(recorded);
  }
  return recording;
}

// Copies rows of a host matrix into the first columns of a wider array of 32-bit numbers.
void write_rows(const mx::array& target, nb::bytes rows, size_t num_rows, size_t num_columns) {
  if (target.ndim() != 2 || target.itemsize() != 4 || size_t(target.shape(0)) < num_rows ||
      size_t(target.shape(1)) < num_columns || rows.size() != num_rows * num_columns * 4) {
    throw std::invalid_argument("write_rows: the rows don't fit the array");
  }
  encoder().commit();
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = rows.c_str();
  copy.srcPitch = num_columns * 4;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = device_address(target);
  copy.dstPitch = size_t(target.shape(1)) * 4;
  copy.WidthInBytes = num_columns * 4;
  copy.Height = num_rows;
  check(cuMemcpy2DAsync(&copy, cuda_stream()), "writing a step's indices");
}

// Page-locked memory and an event, used again and again: making them anew costs more than a step's copy.
struct Slot {
  size_t capacity = 0;
  uint32_t* host = nullptr;
  CUevent event = nullptr;
};

// Callers hold Python's lock. Never freed: at most a few, as many as are in use at once.
std::vector<Slot>& free_slots() {
  static auto* slots = new std::vector<Slot>();
  return *slots;
}

Slot take_slot(size_t count) {
  auto& slots = free_slots();
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].capacity >= count) {
      const Slot slot = slots[i];
      slots.erase(slots.begin() + i);
      return slot;
    }
  }
  Slot slot{count};
  check(cuMemAllocHost(reinterpret_cast<void**>(&slot.host), count * 4), "host memory for samples");
  check(cuEventCreate(&slot.event, CU_EVENT_DISABLE_TIMING), "an event");
  return slot;
}

// The first numbers of a 32-bit array as they are at this place in the stream, once the GPU has come to it.
class Fetch {
 public:
  Fetch(const mx::array& source, size_t count) : count_(count), slot_(take_slot(std::max<size_t>(source.size(), 1))) {
    if (source.itemsize() != 4 || source.size() < count) {
      throw std::invalid_argument("Fetch: the array has fewer numbers, or of another size");
    }
    encoder().commit();
    check(cuMemcpyDtoHAsync(slot_.host, device_address(source), count * 4, cuda_stream()), "reading samples");
    check(cuEventRecord(slot_.event, cuda_stream()), "an event");
  }
  Fetch(const Fetch&) = delete;
  ~Fetch() {
    // The copy may still be under way.
    cuEventSynchronize(slot_.event);
    free_slots().push_back(slot_);
  }

  std::vector<uint32_t> wait() {
    {
      nb::gil_scoped_release release;
      check(cuEventSynchronize(slot_.event), "waiting for samples");
    }
    return std::vector<uint32_t>(slot_.host, slot_.host + count_);
  }

 private:
  size_t count_;
  Slot slot_;
};

}  // namespace
}  // namespace quire

NB_MODULE(_quire_graphs, m) {
  nb::class_<quire::Recording>(m, "Recording")
      .def("launch", &quire::Recording::launch)
      .def_prop_ro("num_nodes", &quire::Recording::num_nodes)
      .def_prop_ro("num_early_starts", &quire::Recording::num_early_starts);
  nb::class_<quire::Fetch>(m, "Fetch")
      .def(nb::init<const mx::array&, size_t>(), nb::arg("source"), nb::arg("count"))
      .def("wait", &quire::Fetch::wait);
  m.def("record", &quire::record, nb::arg("build"), nb::arg("overlaps"));
  m.def("write_rows", &quire::write_rows, nb::arg("target"), nb::arg("rows"), nb::arg("num_rows"),
        nb::arg("num_columns"));
}
