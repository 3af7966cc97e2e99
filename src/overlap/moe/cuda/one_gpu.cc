#include "overlap/moe/cuda/one_gpu.h"

#include <fmt/format.h>

#include "codec/cuda/quantize.h"
#include "core/cuda/check.h"
#include "core/cuda/share.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/cuda/pace.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

ExpertsShape experts_of(const MoeShape& shape, const LocalMoeForm& form) {
  return {.dtype = form.e4m3 ? DType::e4m3 : shape.dtype,
          .experts = shape.experts,
          .rows = shape.tokens * shape.top_k,
          .hidden = shape.hidden,
          .ffn = shape.ffn,
          .paired = form.pairs};
}

const MoeShape& checked(const MoeShape& shape, const LocalMoeForm& form) {
  if (shape.tp != 1) {
    throw InvalidArgument(fmt::format("moe on one GPU: tp = {}: expected 1", shape.tp));
  }
  if (shape.experts < 1 || shape.experts > kMaxExperts) {
    throw InvalidArgument(
        fmt::format("moe on one GPU: experts = {}: expected 1 to {}", shape.experts, kMaxExperts));
  }
  if (shape.top_k < 1 || shape.top_k > shape.experts) {
    throw InvalidArgument(fmt::format("moe on one GPU: top_k = {}: expected 1 to {} (experts)",
                                      shape.top_k, shape.experts));
  }
  if (form.sorting_blocks > 0 && (form.e4m3 || !(form.sorts_first || form.trains))) {
    throw InvalidArgument("moe on one GPU: blocks that sort: expected sorted rows, not of e4m3");
  }
  if (form.sorting_blocks < 0 || form.sorting_blocks >= this_share()->sms()) {
    throw InvalidArgument(fmt::format("moe on one GPU: {} blocks that sort: expected 0 to {}",
                                      form.sorting_blocks, this_share()->sms() - 1));
  }
  if (form.e4m3 && form.trains) {
    throw InvalidArgument("moe on one GPU: a layer that trains: expected no e4m3 weights");
  }
  if (form.e4m3 && shape.dtype != DType::bf16) {
    throw InvalidArgument(fmt::format("moe on one GPU: dtype {}: expected bf16 with e4m3 weights",
                                      name_of(shape.dtype)));
  }
  return shape;
}

}  // namespace

LocalMoe::Training::Training(const ExpertsShape& shape)
    : saved(shape), gradients(shape), routing_idx(ints(shape.padded_rows())) {}

LocalMoe::Codes::Codes(const ExpertsShape& shape)
    : inner(size_t(shape.padded_rows() * shape.ffn)),
      x_scales(floats(shape.padded_rows())),
      inner_scales(floats(shape.padded_rows())) {}

/// With many rows, the quantization kernel sorts its codes. With few, tiles are mostly padding,
/// which a gathering GEMM does not read.
LocalMoeForm form_of(const MoeShape& shape, bool trains, bool e4m3) {
  const int64_t rows = shape.tokens * shape.top_k;
  const bool fills_tiles = rows >= int64_t(shape.experts) * kGroupedRows;
  const bool sorts = e4m3 ? fills_tiles : sorting_is_faster(rows, shape.experts, shape.ffn);
  const bool concurrent = sorts && !trains && !e4m3 && overlapped_sort_is_faster(shape.ffn);
  const int pairs_that_sort = this_share()->sms() / 22;
  return {trains, trains || sorts, e4m3, pairs_are_faster(rows, shape.experts, e4m3),
          concurrent ? 2 * pairs_that_sort : 0};
}

LocalMoe::LocalMoe(const MoeShape& shape, const LocalMoeForm& form)
    : shape_(checked(shape, form)),
      form_{form.trains, form.trains || form.sorts_first, form.e4m3, form.pairs,
            form.sorting_blocks},
      experts_(experts_of(shape, form)),
      in_(make_grouped_gemm(form.trains ? experts_.in_ungated(false)
                                        : experts_.in(!form.sorts_first))),
      out_(make_grouped_gemm(experts_.out())),
      padded_rows_(experts_.padded_rows()),
      inner_(size_t(padded_rows_ * shape.ffn) * size_of(shape.dtype)),
      results_(size_t(padded_rows_ * shape.hidden) * size_of(shape.dtype)),
      counts_(ints(shape.experts)),
      source_(ints(padded_rows_)),
      positions_(ints(shape.tokens * shape.top_k)),
      dropped_(sizeof(int32_t)),
      group_rows_(size_t(shape.experts + 1) * sizeof(schedule::GroupRows)) {
  if (form.trains) training_.emplace(experts_);
  if (form.e4m3) codes_.emplace(experts_);
  if (form.sorting_blocks == 0) return;
  ready_ = ints(experts_.out().row_tiles());
  const double of_row = double(shape.hidden * 2) * sorting_us_of_byte(form.sorting_blocks) *
                        tiles_of_us(shape.hidden);
  in_table_ = in_->add_table({.reserved_blocks = form.sorting_blocks,
                              .joining = {.of_row = float(of_row)},
                              .ordered = true});
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
                              const Tensor& w_out, const Tensor& out,
                              const MoeScales& scales) const {
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
  const int64_t in_rows = shape_.experts * 2 * shape_.ffn,
                out_rows = shape_.experts * shape_.hidden;
  require("w_in", w_in, in_rows, shape_.hidden, experts_.dtype, experts_.dtype);
  require("w_out", w_out, out_rows, shape_.ffn, experts_.dtype, experts_.dtype);
  require("out", out, rows, shape_.hidden, shape_.dtype, DType::f32);
  if (!form_.e4m3) return;
  check_scales("scales.w_in", scales.w_in, in_rows);
  check_scales("scales.w_out", scales.w_out, out_rows);
}

void LocalMoe::check_scales(const char* name, const Tensor& scales, int64_t rows) const {
  const bool fits = scales.dims() == 1 && scales.dim(0) == rows && scales.dtype() == DType::f32 &&
                    scales.contiguous() && scales.device().kind == DeviceKind::cuda &&
                    reinterpret_cast<uintptr_t>(scales.data()) % 16 == 0;
  if (fits) return;
  throw InvalidArgument(
      fmt::format("moe on one GPU: {} {}: expected f32 [{}] there, contiguous, 16-byte aligned",
                  name, scales.describe(), rows));
}

void LocalMoe::permute(const MoeRouting& routing, cudaStream_t stream) {
  MoePermutation permutation;
  permutation.experts = routing.experts.as<int32_t>();
  permutation.routings = routing.experts.elements();
  permutation.top_k = shape_.top_k;
  permutation.groups = permutation.all_experts = shape_.experts;
  permutation.counts = ints(counts_);
  permutation.source = ints(source_);
  permutation.position = ints(positions_);
  permutation.dropped = ints(dropped_);
  permutation.tables[0] = in_->table(in_table_);
  permutation.ready = form_.sorting_blocks > 0 ? uints(ready_) : nullptr;
  permutation.tables[1] = out_->table();
  permutation.table_count = 2;
  permutation.group_rows = reinterpret_cast<schedule::GroupRows*>(group_rows_.data());
  if (training_) {
    permutation.routing_idx = ints(training_->routing_idx);
    training_->gradients.add_tables(permutation);
  }
  launch_permute(permutation, stream);
}

void LocalMoe::prepare(const Tensor& x, cudaStream_t stream) {
  if (!codes_) {
    const MoeGather gather{
        .x = x.data(), .source = ints(source_), .out = prepared_x(), .columns = shape_.hidden};
    if (form_.sorting_blocks == 0) return launch_gather(sorted(), gather, stream);
    return launch_overlapped_gather(in_->table(in_table_), gather, uints(ready_),
                                    {form_.sorting_blocks, form_.pairs}, stream);
  }
  if (!form_.sorts_first) {
    return launch_quantize_rows(x, results_.view(DType::e4m3, {x.dim(0), shape_.hidden}),
                                codes_->x_scales.view(DType::f32, {x.dim(0)}), stream);
  }
  launch_sorted_quantize(sorted(),
                         {.x = x.data(),
                          .source = ints(source_),
                          .codes = prepared_x(),
                          .scales = floats(codes_->x_scales),
                          .columns = shape_.hidden},
                         stream);
}

void LocalMoe::multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream,
                           const MoeScales& scales) {
  const bool prepared = form_.sorts_first || form_.e4m3;
  GroupedArgs args{.x = prepared ? prepared_x() : x.data(),
                   .source = ints(source_),
                   .weight = w_in.data(),
                   .out = training_ ? training_->saved.gate_up.data() : inner_.data()};
  if (codes_) args.scales = {floats(codes_->x_scales), scales.w_in.as<float>()};
  args.ready = form_.sorting_blocks > 0 ? uints(ready_) : nullptr;
  in_->launch(args, stream, in_table_);
}

void LocalMoe::gate(cudaStream_t stream) {
  launch_sorted_swiglu(sorted(), training().saved.gate_up.data(), inner_.data(), shape_.ffn,
                       stream);
}

void LocalMoe::quantize_inner(cudaStream_t stream) {
  launch_sorted_quantize(sorted(),
                         {.x = inner_.data(),
                          .source = ints(source_),
                          .sorted = true,
                          .codes = codes_->inner.data(),
                          .scales = floats(codes_->inner_scales),
                          .columns = shape_.ffn},
                         stream);
}

void LocalMoe::multiply_out(const Tensor& w_out, cudaStream_t stream, const MoeScales& scales) {
  GroupedArgs args{.x = codes_ ? codes_->inner.data() : inner_.data(),
                   .weight = w_out.data(),
                   .out = results_.data()};
  if (codes_) args.scales = {floats(codes_->inner_scales), scales.w_out.as<float>()};
  out_->launch(args, stream);
}

void LocalMoe::sum(const MoeRouting& routing, const Tensor& out, cudaStream_t stream) {
  launch_weighted_sum(results_.view(shape_.dtype, {padded_rows_, shape_.hidden}), ints(positions_),
                      routing.weights.as<float>(), shape_.top_k, out, stream);
}

void LocalMoe::forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out, cudaStream_t stream,
                       const MoeScales& scales) {
  check_operands(x, routing, w_in, w_out, out, scales);
  if (x.dim(0) == 0) return;
  permute(routing, stream);
  if (form_.sorts_first || codes_) prepare(x, stream);
  multiply_in(x, w_in, stream, scales);
  if (training_) gate(stream);
  if (codes_) quantize_inner(stream);
  multiply_out(w_out, stream, scales);
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

/// A dropped routing has no gradient.
void LocalMoe::gate_backward(const MoeRouting& routing, const Tensor& dweights,
                             cudaStream_t stream) {
  check(cudaMemsetAsync(dweights.data(), 0, dweights.bytes(), stream), "clear dweights");
  Training& t = training();
  t.gradients.gate(sorted(), t.saved, ints(t.routing_idx), routing.weights.as<float>(),
                   dweights.as<float>(), stream);
}

void LocalMoe::sum_dx(const Tensor& dx, cudaStream_t stream) {
  launch_weighted_sum(gradients().dx().view(shape_.dtype, {padded_rows_, shape_.hidden}),
                      ints(positions_), nullptr, shape_.top_k, dx, stream);
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
  gradients().multiply_d_act(w_out.data(), stream);
  gate_backward(routing, dweights, stream);
  gradients().multiply_dx(w_in.data(), stream);
  sum_dx(dx, stream);
  add_dw_in(dw_in, stream);
  add_dw_out(dw_out, stream);
}

int LocalMoe::dropped(cudaStream_t stream) const {
  int32_t count = 0;
  check(cudaStreamSynchronize(stream), "moe on one GPU");
  check(cudaMemcpyAsync(&count, dropped_.data(), sizeof count, cudaMemcpyDeviceToHost, stream),
        "read dropped routings");
  check(cudaStreamSynchronize(stream), "read dropped routings");
  return count;
}

}  // namespace tandem::gpu
