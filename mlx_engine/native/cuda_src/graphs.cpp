// Records what MLX puts on the GPU for a step, as a CUDA graph, and runs it again without MLX: building the same few
// hundred nodes anew costs the host more than the GPU needs for them.
//
// MLX's CUDA backend collects the kernels of an evaluation in a graph before it launches them. A recording takes a copy of
// that graph, ready to launch, and holds on to all memory that its kernels use. Inputs and outputs are arrays whose
// memory stays: the host writes to the inputs before each launch.
//
// In a recording kernels may overlap (programmatic dependent launch): one of ours starts when those before it have no
// threadgroup left to start, and waits by itself, in the kernel's text, until they have ended (QUIRE_AWAIT_PREVIOUS).

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
#include <utility>
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

// What mx.fast.cuda_kernel calls the kernels that texts.py names quire_...; they wait for those before them.
constexpr const char* OURS = "custom_kernel_quire_";
// The first compute capability whose kernels can wait.
constexpr int FIRST_WITH_OVERLAP = 9;

bool is_kernel(CUgraphNode node) {
  CUgraphNodeType type;
  check(cuGraphNodeGetType(node, &type), "a node's type");
  return type == CU_GRAPH_NODE_TYPE_KERNEL;
}

bool is_ours(CUgraphNode node) {
  CUDA_KERNEL_NODE_PARAMS params = {};
  const char* name = nullptr;
  if (!is_kernel(node) || cuGraphKernelNodeGetParams(node, &params) != CUDA_SUCCESS) {
    return false;
  }
  const CUresult named = params.func != nullptr   ? cuFuncGetName(&name, params.func)
                         : params.kern != nullptr ? cuKernelGetName(&name, params.kern)
                                                  : CUDA_ERROR_NOT_FOUND;
  return named == CUDA_SUCCESS && name != nullptr && std::strstr(name, OURS) != nullptr;
}

using Edges = std::vector<std::pair<CUgraphNode, CUgraphNode>>;

// The edges without those that others imply, as to the kernel that made a residual: they might keep a kernel from starting
// early.
Edges without_implied(const Edges& edges) {
  std::unordered_map<CUgraphNode, size_t> places;
  for (const auto& [from, to] : edges) {
    places.emplace(from, places.size());
    places.emplace(to, places.size());
  }
  const size_t words = (places.size() + 63) / 64;
  // For each node those that it comes after, a bit each.
  std::vector<std::vector<uint64_t>> before(places.size(), std::vector<uint64_t>(words));
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [from, to] : edges) {
      const auto& source = before[places[from]];
      auto& target = before[places[to]];
      for (size_t w = 0; w < words; ++w) {
        const uint64_t own = places[from] / 64 == w ? uint64_t(1) << places[from] % 64 : 0;
        const uint64_t all = target[w] | source[w] | own;
        changed = changed || all != target[w];
        target[w] = all;
      }
    }
  }
  std::unordered_map<CUgraphNode, std::vector<CUgraphNode>> sources;
  for (const auto& [from, to] : edges) {
    sources[to].push_back(from);
  }
  Edges kept;
  for (const auto& [from, to] : edges) {
    const size_t place = places[from];
    const auto& others = sources[to];
    const bool implied = std::any_of(others.begin(), others.end(), [&](CUgraphNode other) {
      return other != from && (before[places[other]][place / 64] >> place % 64 & 1) != 0;
    });
    if (!implied) {
      kept.emplace_back(from, to);
    }
  }
  return kept;
}

class Recording {
 public:
  explicit Recording(bool overlap) : overlap_(overlap) {}
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
    check(cuGraphGetNodes(graph, nullptr, &num_nodes_), "the graph's nodes");
    if (!overlap_ || from.device().compute_capability_major() < FIRST_WITH_OVERLAP ||
        !instantiate_overlapped(graph, reinterpret_cast<CUgraphNode*>(sources.data()),
                                reinterpret_cast<CUgraphNode*>(targets.data()), sources.size())) {
      if (!sources.empty()) {
        // The encoder would add them when it launches the graph.
        check(cuGraphAddDependencies(graph, reinterpret_cast<CUgraphNode*>(sources.data()),
                                     reinterpret_cast<CUgraphNode*>(targets.data()), nullptr, sources.size()),
              "the graph's dependencies");
        sources.clear();
        targets.clear();
      }
      check(cuGraphInstantiateWithFlags(&graph_, graph, 0), "instantiating the graph");
    }
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
  // Edges whose target may start before its source has ended.
  size_t num_overlapped() const { return num_overlapped_; }

 private:
  // Whether CUDA takes the graph with such edges. In a copy: MLX runs its own once as it is, and keeps what it makes of
  // it for other graphs of the same form, whose kernels may not wait.
  bool instantiate_overlapped(CUgraph graph, const CUgraphNode* sources, const CUgraphNode* targets, size_t count) {
    size_t num_added = 0;
    if (cuGraphGetEdges(graph, nullptr, nullptr, nullptr, &num_added) != CUDA_SUCCESS || num_added != 0) {
      return false;  // The encoder has added edges by itself: not all are in its lists.
    }
    Edges edges;
    for (size_t i = 0; i < count; ++i) {
      edges.emplace_back(sources[i], targets[i]);
    }
    CUgraph copy = nullptr;
    if (cuGraphClone(&copy, graph) != CUDA_SUCCESS) {
      return false;
    }
    size_t num_overlapped = 0;
    bool fine = true;
    std::vector<CUgraphNode> from, to;
    std::vector<CUgraphEdgeData> data;
    for (const auto& [source, target] : without_implied(edges)) {
      CUgraphNode one = nullptr, two = nullptr;
      fine = fine && cuGraphNodeFindInClone(&one, source, copy) == CUDA_SUCCESS &&
             cuGraphNodeFindInClone(&two, target, copy) == CUDA_SUCCESS;
      from.push_back(one);
      to.push_back(two);
      CUgraphEdgeData edge = {};
      if (is_kernel(source) && is_ours(target)) {
        edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        ++num_overlapped;
      }
      data.push_back(edge);
    }
    fine = fine && cuGraphAddDependencies(copy, from.data(), to.data(), data.data(), from.size()) == CUDA_SUCCESS &&
           cuGraphInstantiateWithFlags(&graph_, copy, 0) == CUDA_SUCCESS;
    cuGraphDestroy(copy);
    if (fine) {
      num_overlapped_ = num_overlapped;
    } else {
      graph_ = nullptr;
    }
    return fine;
  }

  const bool overlap_;
  size_t num_overlapped_ = 0;
  CUgraphExec graph_ = nullptr;
  size_t num_nodes_ = 0;
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

// Runs `build`, which gives a lazy array, evaluates that, and returns the recording.
std::shared_ptr<Recording> record(const nb::callable& build, bool overlap) {
  auto recording = std::make_shared<Recording>(overlap);
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
      .def_prop_ro("num_overlapped", &quire::Recording::num_overlapped);
  nb::class_<quire::Fetch>(m, "Fetch")
      .def(nb::init<const mx::array&, size_t>(), nb::arg("source"), nb::arg("count"))
      .def("wait", &quire::Fetch::wait);
  m.def("record", &quire::record, nb::arg("build"), nb::arg("overlap"));
  m.def("write_rows", &quire::write_rows, nb::arg("target"), nb::arg("rows"), nb::arg("num_rows"),
        nb::arg("num_columns"));
}
