#include "overlap/cuda/local_moe.h"

#include <fmt/format.h>

#include "core/cuda/check.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

GroupedShape in_shape(const MoeShape& shape) {
  return {.dtype = shape.dtype,
          .groups = shape.experts,
          .rows = shape.tokens * shape.top_k,
          .columns = shape.ffn,
          .k = shape.hidden,
          .gathered = true,
          .gated = true};
}

GroupedShape out_shape(const MoeShape& shape) {
  return {.dtype = shape.dtype,
          .groups = shape.experts,
          .rows = shape.tokens * shape.top_k,
          .columns = shape.hidden,
          .k = shape.ffn};
}

const MoeShape& checked(const MoeShape& shape) {
  if (shape.tp != 1) {
    throw InvalidArgument(fmt::format("moe on one GPU: tp = {}: expected 1", shape.tp));
  }
  if (shape.experts < 1 || shape.experts > kMostExperts) {
    throw InvalidArgument(
        fmt::format("moe on one GPU: experts = {}: expected 1 to {}", shape.experts, kMostExperts));
  }
  if (shape.top_k < 1 || shape.top_k > shape.experts) {
    throw InvalidArgument(fmt::format("moe on one GPU: top_k = {}: expected 1 to {} (experts)",
                                      shape.top_k, shape.experts));
  }
  return shape;
}

size_t bytes_of(int64_t count) {
  return size_t(count) * sizeof(int32_t);
}

int32_t* ints(const DeviceMemory& memory) {
  return reinterpret_cast<int32_t*>(memory.data());
}

}  // namespace

LocalMoe::LocalMoe(const MoeShape& shape)
    : shape_(checked(shape)),
      in_(make_grouped_gemm(in_shape(shape))),
      out_(make_grouped_gemm(out_shape(shape))),
      padded_rows_(in_shape(shape).padded_rows()),
      inner_(size_t(padded_rows_ * shape.ffn) * size_of(shape.dtype)),
      results_(size_t(padded_rows_ * shape.hidden) * size_of(shape.dtype)),
      counts_(bytes_of(shape.experts)),
      source_(bytes_of(padded_rows_)),
      place_(bytes_of(shape.tokens * shape.top_k)),
      refused_(sizeof(int32_t)) {}

void LocalMoe::check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                              const Tensor& w_out, const Tensor& out) const {
  const auto require = [&](const char* name, const Tensor& tensor, int64_t rows, int64_t columns,
                           DType dtype, DType other) {
    const bool fits = tensor.dims() == 2 && tensor.dim(0) == rows && tensor.dim(1) == columns &&
                      (tensor.dtype() == dtype || tensor.dtype() == other) && tensor.contiguous() &&
                      tensor.device().kind == DeviceKind::cuda;
    if (fits) return;
    throw InvalidArgument(
        fmt::format("moe on one GPU: {} {}: expected {} [{}, {}] there, contiguous", name,
                    tensor.describe(), name_of(dtype), rows, columns));
  };
  const int64_t rows = x.dims() == 2 ? x.dim(0) : -1;
  if (rows < 0 || rows > shape_.tokens) {
    throw InvalidArgument(
        fmt::format("moe on one GPU: x {}: expected at most {} rows", x.describe(), shape_.tokens));
  }
  require("x", x, rows, shape_.hidden, shape_.dtype, shape_.dtype);
  require("experts", routing.experts, rows, shape_.top_k, DType::i32, DType::i32);
  require("weights", routing.weights, rows, shape_.top_k, DType::f32, DType::f32);
  require("w_in", w_in, shape_.experts * 2 * shape_.ffn, shape_.hidden, shape_.dtype, shape_.dtype);
  require("w_out", w_out, shape_.experts * shape_.hidden, shape_.ffn, shape_.dtype, shape_.dtype);
  require("out", out, rows, shape_.hidden, shape_.dtype, DType::f32);
}

void LocalMoe::place(const MoeRouting& routing, cudaStream_t stream) {
  MoePlacing placing;
  placing.experts = routing.experts.as<int32_t>();
  placing.choices = routing.experts.elements();
  placing.top_k = shape_.top_k;
  placing.groups = placing.all_experts = shape_.experts;
  placing.counts = ints(counts_);
  placing.source = ints(source_);
  placing.place = ints(place_);
  placing.refused = ints(refused_);
  placing.tables[0] = in_->table();
  placing.tables[1] = out_->table();
  placing.table_count = 2;
  launch_place(placing, stream);
}

void LocalMoe::multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream) {
  in_->launch({x.data(), ints(source_), w_in.data(), inner_.data()}, stream);
}

void LocalMoe::multiply_out(const Tensor& w_out, cudaStream_t stream) {
  out_->launch({inner_.data(), nullptr, w_out.data(), results_.data()}, stream);
}

void LocalMoe::sum(const MoeRouting& routing, const Tensor& out, cudaStream_t stream) {
  launch_weighted_sum(results_.view(shape_.dtype, {padded_rows_, shape_.hidden}), ints(place_),
                      routing.weights.as<float>(), shape_.top_k, out, stream);
}

void LocalMoe::forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out, cudaStream_t stream) {
  check_operands(x, routing, w_in, w_out, out);
  if (x.dim(0) == 0) return;
  place(routing, stream);
  multiply_in(x, w_in, stream);
  multiply_out(w_out, stream);
  sum(routing, out, stream);
}

int LocalMoe::refused(cudaStream_t stream) const {
  int32_t count = 0;
  check(cudaStreamSynchronize(stream), "moe on one GPU");
  check(cudaMemcpyAsync(&count, refused_.data(), sizeof count, cudaMemcpyDeviceToHost, stream),
        "read refused choices");
  check(cudaStreamSynchronize(stream), "read refused choices");
  return count;
}

}  // namespace tandem::gpu
