#include "overlap/contract/cuda/dense.h"

#include <fmt/format.h>

#include "core/cuda/architecture.h"
#include "core/operands.h"
#include "core/system/env.h"
#include "overlap/contract/check.h"
#include "overlap/contract/operator.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {

LtContext& lt_context(GpuCommunicator& comm) {
  return comm.attached<LtContext>([] { return new LtContext; });
}

bool has_hopper_kernels(const GpuCommunicator& comm) {
  return architecture_of(comm.device()) == kHopper && !env().gpu_portable;
}

bool has_fused_kernels(const GpuCommunicator& comm) {
  return !comm.link_pacer() && has_hopper_kernels(comm);
}

namespace {

bool is_summed(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

// Contiguous, 16-byte aligned memory of this GPU; may be null if there are no elements.
bool is_dense(const GpuCommunicator& comm, const Tensor& tensor) {
  return tensor.contiguous() && tensor.device() == Device{DeviceKind::cuda, comm.device()} &&
         reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 &&
         (tensor.data() || tensor.elements() == 0);
}

std::string describe_memory(const Tensor& tensor) {
  return fmt::format(
      "{} on {} {}", tensor.contiguous() ? tensor.describe() : describe_with_strides(tensor),
      tensor.device().kind == DeviceKind::cuda ? "cuda" : "cpu", tensor.device().index);
}

void check_vector(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& vector, DType dtype, int64_t count) {
  const bool right = vector.dims() == 1 && vector.dtype() == dtype && vector.dim(0) == count &&
                     is_dense(comm, vector);
  if (right) return;
  throw InvalidArgument(fmt::format(
      "{}: {}: {} at {}: expected a contiguous {}[{}], 16-byte aligned, on cuda {}", op, operand,
      describe_memory(vector), vector.data(), name_of(dtype), count, comm.device()));
}

}  // namespace

GemmShape product_of(const OpDesc& desc, int64_t rows, bool with_bias) {
  return {.m = rows,
          .n = desc.n,
          .k = desc.k,
          .in = desc.dtype,
          .out = desc.result(),
          .weight_is_kn = desc.weight_kn,
          .bias = with_bias,
          .scaling = desc.scaled() ? std::optional(desc.scaling) : std::nullopt};
}

ScalePointers pointers_of(const OpDesc& desc, const Scales* scales, int64_t first_row) {
  if (!desc.scaled()) return {};
  return {scales->x.as<const float>() + (desc.scaled_by_row() ? first_row : 0),
          scales->weight.as<const float>()};
}

void check_shape(GpuCommunicator& comm, std::string_view op, const OpDesc& shape, bool same_n,
                 bool same_k) {
  if (!shape.scaled() && !is_summed(shape.dtype)) {
    throw InvalidArgument(
        fmt::format("{}: dtype {}: expected f32, bf16, f16 or e4m3", op, name_of(shape.dtype)));
  }
  if (!is_summed(shape.result())) {
    throw InvalidArgument(fmt::format("{}: e4m3 to {}: expected an out_dtype of f32, bf16 or f16",
                                      op, name_of(shape.result())));
  }
  if (shape.scaled() && shape.weight_kn) {
    throw InvalidArgument(fmt::format("{}: e4m3 weight [K, N]: expected [N, K]", op));
  }
  const int64_t step = 16 / int64_t(size_of(shape.dtype));
  if (shape.m < 0 || shape.n < 1 || shape.k < 1 || shape.n % step != 0 || shape.k % step != 0) {
    throw InvalidArgument(fmt::format(
        "{}: M {} N {} K {}: expected M of at least 0, N and K positive multiples of {} (16 bytes)",
        op, shape.m, shape.n, shape.k, step));
  }
  check_extents(op, shape.m, shape.n, shape.k);
  check_gpu_extents(op, shape.m, shape.n, shape.k);
  share_gemm_choices(comm);
  OpDesc agreed = shape;
  agreed.local_n = !same_n;
  agreed.local_k = !same_k;
  comm.require_same(op, agreement(agreed));
}

void check_matrix(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& tensor, DType dtype, int64_t rows, int64_t columns) {
  const bool right = tensor.dims() == 2 && tensor.dtype() == dtype && tensor.dim(0) == rows &&
                     tensor.dim(1) == columns && is_dense(comm, tensor);
  if (right) return;
  throw InvalidArgument(
      fmt::format("{}: {}: {} at {}: expected a contiguous {}[{}, {}], 16-byte aligned, on cuda {}",
                  op, operand, describe_memory(tensor), tensor.data(), name_of(dtype), rows,
                  columns, comm.device()));
}

OperandExtents extents_of(const OpDesc& desc) {
  const auto stored = [&](const OperandDesc& d) -> Extent {
    if (desc.weight_kn && d.any_layout) return {d.dtype, d.columns, d.rows};
    return {d.dtype, d.rows, d.columns};
  };
  OperandExtents all{stored(desc.x), stored(desc.weight), stored(desc.out)};
  if (desc.scaled()) all.out.dtype = desc.result();
  return all;
}

void check_operands(const GpuCommunicator& comm, const OpDesc& desc, const Operands& operands) {
  const auto& [x, weight, out, bias, scales, add_norm, accumulate] = operands;
  check_call(desc, operands);
  const OperandExtents expected = extents_of(desc);
  const auto check_as = [&](const char* name, const Tensor& tensor, const Extent& e) {
    check_matrix(comm, desc.op, name, tensor, e.dtype, e.rows, e.columns);
  };
  const auto check_stored = [&](const OperandDesc& d, const Tensor& tensor, const Extent& e) {
    const bool transposed = desc.weight_kn && d.any_layout && tensor.dims() == 2;
    check_as(d.name, transposed ? tensor.transposed() : tensor, e);
  };
  check_stored(desc.x, x, expected.x);
  check_stored(desc.weight, weight, expected.weight);
  check_stored(desc.out, out, expected.out);
  if (bias) check_vector(comm, desc.op, "bias", *bias, desc.result(), desc.n);
  if (desc.scaled() != (scales != nullptr)) {
    throw InvalidArgument(fmt::format("{}: scales {}: expected {} with dtype {}", desc.op,
                                      scales ? "given" : "missing", desc.scaled() ? "them" : "none",
                                      name_of(desc.dtype)));
  }
  if (scales) {
    const bool by_row = desc.scaled_by_row();
    check_vector(comm, desc.op, "scales.x", scales->x, DType::f32, by_row ? desc.x.rows : 1);
    check_vector(comm, desc.op, "scales.weight", scales->weight, DType::f32, by_row ? desc.n : 1);
  }
  check_add_norm(desc.op, desc.add_norm, add_norm);
  if (!add_norm) return;
  check_as("residual", add_norm->residual, expected.out);
  check_as("hidden", add_norm->hidden, expected.out);
  check_vector(comm, desc.op, "gain", add_norm->gain, expected.out.dtype, desc.n);
}

}  // namespace tandem::gpu
