#include "overlap/cuda/local_moe.h"

#include <fmt/format.h>

#include "core/cuda/check.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

ExpertsShape experts_of(const MoeShape& shape) {
  return {.dtype = shape.dtype,
          .experts = shape.experts,
          .rows = shape.tokens * shape.top_k,
          .hidden = shape.hidden,
          .ffn = shape.ffn};
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

LocalMoe::Training::Training(const ExpertsShape& shape)
    : saved(shape), gradients(shape), choice(bytes_of(shape.padded_rows())) {}

LocalMoeForm form_of(const MoeShape&, bool trains) {
  return {trains, trains};
}

LocalMoe::LocalMoe(const MoeShape& shape, const LocalMoeForm& form)
    : shape_(checked(shape)),
      form_{form.trains, form.trains || form.sorts_first},
      experts_(experts_of(shape)),
      in_(make_grouped_gemm(form.trains ? experts_.in_ungated(false)
                                        : experts_.in(!form.sorts_first))),
      out_(make_grouped_gemm(experts_.out())),
      padded_rows_(experts_.padded_rows()),
      inner_(size_t(padded_rows_ * shape.ffn) * size_of(shape.dtype)),
      results_(size_t(padded_rows_ * shape.hidden) * size_of(shape.dtype)),
      counts_(bytes_of(shape.experts)),
      source_(bytes_of(padded_rows_)),
      place_(bytes_of(shape.tokens * shape.top_k)),
      refused_(sizeof(int32_t)),
      group_rows_(size_t(shape.experts + 1) * sizeof(schedule::GroupRows)) {
  if (form.trains) training_.emplace(experts_);
}

LocalMoe::Training& LocalMoe::training() {
  if (!training_) {
    throw InvalidArgument("moe on one GPU: a backward pass: expected a layer that trains");
  }
  return *training_;
}

SortedRows LocalMoe::sorted() const {
  return {.dtype = shape_.dtype,
          .padded_rows = padded_rows_,
          .group_rows = reinterpret_cast<const schedule::GroupRows*>(group_rows_.data()),
          .groups = shape_.experts};
}

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
  placing.group_rows = reinterpret_cast<schedule::GroupRows*>(group_rows_.data());
  if (training_) {
    placing.choice = ints(training_->choice);
    training_->gradients.add_tables(placing);
  }
  launch_place(placing, stream);
}

void LocalMoe::gather(const Tensor& x, cudaStream_t stream) {
  launch_gather(
      sorted(),
      {.x = x.data(), .source = ints(source_), .out = sorted_x(), .columns = shape_.hidden},
      stream);
}

void LocalMoe::multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream) {
  void* const out = training_ ? training_->saved.gate_up.data() : inner_.data();
  in_->launch({form_.sorts_first ? sorted_x() : x.data(), ints(source_), w_in.data(), out}, stream);
}

void LocalMoe::gate(cudaStream_t stream) {
  launch_sorted_swiglu(sorted(), training().saved.gate_up.data(), inner_.data(), shape_.ffn,
                       stream);
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
  if (form_.sorts_first) gather(x, stream);
  multiply_in(x, w_in, stream);
  if (training_) gate(stream);
  multiply_out(w_out, stream);
  sum(routing, out, stream);
}

void LocalMoe::gather_dout(const Tensor& dout, cudaStream_t stream) {
  launch_gather(sorted(),
                {.x = dout.data(),
                 .source = ints(source_),
                 .out = gradients().dout(),
                 .columns = shape_.hidden},
                stream);
}

/// A choice that was refused has no gradient.
void LocalMoe::gate_backward(const MoeRouting& routing, const Tensor& dweights,
                             cudaStream_t stream) {
  check(cudaMemsetAsync(dweights.data(), 0, dweights.bytes(), stream), "clear dweights");
  Training& t = training();
  t.gradients.gate(sorted(), t.saved, ints(t.choice), routing.weights.as<float>(),
                   dweights.as<float>(), stream);
}

void LocalMoe::sum_dx(const Tensor& dx, cudaStream_t stream) {
  launch_weighted_sum(gradients().dx().view(shape_.dtype, {padded_rows_, shape_.hidden}),
                      ints(place_), nullptr, shape_.top_k, dx, stream);
}

void LocalMoe::add_dw_in(const Tensor& dw_in, cudaStream_t stream) {
  gradients().add_dw_in(sorted(), training().saved, dw_in.as<float>(), stream);
}

void LocalMoe::add_dw_out(const Tensor& dw_out, cudaStream_t stream) {
  gradients().add_dw_out(sorted(), dw_out.as<float>(), stream);
}

void LocalMoe::backward(const Tensor& dout, const MoeRouting& routing, const Tensor& w_in,
                        const Tensor& w_out, const Tensor& dx, const Tensor& dweights,
                        const Tensor& dw_in, const Tensor& dw_out, cudaStream_t stream) {
  training();
  if (dout.dim(0) == 0) return;
  gather_dout(dout, stream);
  gradients().multiply_dinner(w_out.data(), stream);
  gate_backward(routing, dweights, stream);
  gradients().multiply_dx(w_in.data(), stream);
  sum_dx(dx, stream);
  add_dw_in(dw_in, stream);
  add_dw_out(dw_out, stream);
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
