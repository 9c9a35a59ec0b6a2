// The Python module: MLX operations around the kernels, evaluated on MLX's CPU stream.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "gemm.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "thread_pool.h"

namespace mx = mlx::core;
namespace nb = nanobind;

namespace quire {
namespace {

class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " runs on the CPU only");
  }
};

void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

class PackWeight : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  DEFINE_NAME(PackWeight)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto& weight = inputs[0];
    auto& out = outputs[0];
    allocate(out);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [source = weight.data<float>(), n = weight.shape(0), k = weight.shape(1), buffer = out.data<float>()] {
          pack(source, n, k, buffer);
        });
  }
};

class PackedLinear : public CpuPrimitive {
 public:
  PackedLinear(mx::Stream stream, int first, int n) : CpuPrimitive(stream), first_(first), n_(n) {}
  DEFINE_NAME(PackedLinear)

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& linear = static_cast<const PackedLinear&>(other);
    return first_ == linear.first_ && n_ == linear.n_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    auto shape = inputs[0].shape();
    shape.back() = n_;
    return {std::move(shape)};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto& x = inputs[0];
    auto& out = outputs[0];
    allocate(out);
    const size_t k = x.shape(-1);
    const float* bias = inputs.size() > 2 ? inputs[2].data<float>() + first_ : nullptr;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [source = x.data<float>(), m = x.size() / k, k, buffer = inputs[1].data<float>(), first = size_t(first_), bias,
         n = size_t(n_), target = out.data<float>()] {
          linear(source, m, k, first_panel(buffer) + first * k, bias, n, target);
        });
  }

 private:
  int first_;
  int n_;
};

mx::Stream cpu_stream() { return mx::default_stream(mx::Device::cpu); }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

mx::array pack_weight(const mx::array& weight) {
  if (weight.ndim() != 2 || weight.dtype() != mx::float32 || weight.size() == 0) {
    refuse("pack_weight takes a float32 matrix [n, k] with at least one element");
  }
  const auto stream = cpu_stream();
  const auto size = packed_size(weight.shape(0), weight.shape(1));
  if (size > size_t(INT32_MAX)) {
    refuse("pack_weight takes at most 2**31 - 1 elements, padding included");
  }
  return mx::array({int(size)}, mx::float32, std::make_shared<PackWeight>(stream),
                   {mx::contiguous(weight, false, stream)});
}

mx::array packed_linear(const mx::array& x, const mx::array& packed, int n, int first,
                        const std::optional<mx::array>& bias) {
  if (x.ndim() == 0 || x.shape(-1) == 0) {
    refuse("packed_linear takes x [..., k] with k at least 1");
  }
  if (first < 0 || first % kPanelWidth != 0 || n < 0) {
    refuse("packed_linear's first column must be a multiple of the panel width, " + std::to_string(kPanelWidth));
  }
  if (packed.ndim() != 1 || packed.dtype() != mx::float32 ||
      packed.size() < packed_size(size_t(first) + size_t(n), x.shape(-1))) {
    refuse("packed_linear: the packed weight is smaller than " + std::to_string(first + n) + " rows of " +
           std::to_string(x.shape(-1)));
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) < first + n)) {
    refuse("packed_linear: the bias is shorter than " + std::to_string(first + n));
  }
  const auto stream = cpu_stream();
  std::vector<mx::array> inputs = {mx::contiguous(mx::astype(x, mx::float32, stream), false, stream), packed};
  if (bias) {
    inputs.push_back(mx::contiguous(mx::astype(*bias, mx::float32, stream), false, stream));
  }
  auto shape = x.shape();
  shape.back() = n;
  return mx::array(std::move(shape), mx::float32, std::make_shared<PackedLinear>(stream, first, n), std::move(inputs));
}

}  // namespace
}  // namespace quire

NB_MODULE(_quire_native, m) {
  m.attr("PANEL_WIDTH") = quire::kPanelWidth;
  m.attr("VECTOR_WIDTH") = quire::kVectorWidth;
  m.def("pack_weight", &quire::pack_weight, nb::arg("weight"),
        "The panels of a float32 weight [n, k], as an opaque array for packed_linear.");
  m.def("packed_linear", &quire::packed_linear, nb::arg("x"), nb::arg("packed"), nb::kw_only(), nb::arg("n"),
        nb::arg("first") = 0, nb::arg("bias") = nb::none(),
        "Columns first to first + n of x [..., k] times the transpose of the packed weight, plus bias: [..., n].");
  m.def("set_num_threads", [](int n) { quire::ThreadPool::instance().set_num_threads(n); }, nb::arg("num_threads"));
  m.def("num_threads", [] { return quire::ThreadPool::instance().num_threads(); });
}
