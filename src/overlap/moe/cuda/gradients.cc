#include "overlap/moe/cuda/gradients.h"

namespace tandem::gpu {
namespace {

DeviceMemory sorted_rows(const ExpertsShape& shape, int64_t columns) {
  return DeviceMemory(size_t(shape.padded_rows() * columns) * size_of(shape.dtype));
}

/// Backward GEMM through the weight of `product`, in the layout that `product` reads.
GroupedShape back_through(GroupedShape product) {
  std::swap(product.columns, product.k);
  product.transposed = true;
  return product;
}

WgradShape weight_of(const GroupedShape& product) {
  return {.dtype = product.dtype,
          .groups = product.groups,
          .padded_rows = product.padded_rows(),
          .rows = product.columns,
          .columns = product.k};
}

}  // namespace

MoeSaved::MoeSaved(const ExpertsShape& shape)
    : x(sorted_rows(shape, shape.hidden)), gate_up(sorted_rows(shape, 2 * shape.ffn)) {}

ExpertGradients::ExpertGradients(const ExpertsShape& shape)
    : shape_(shape),
      to_inner_(make_grouped_gemm(back_through(shape.out()))),
      to_x_(make_grouped_gemm(back_through(shape.in_ungated(false)))),
      of_in_(make_grouped_wgrad(weight_of(shape.in_ungated(false)))),
      of_out_(make_grouped_wgrad(weight_of(shape.out()))),
      dout_(sorted_rows(shape, shape.hidden)),
      dx_(sorted_rows(shape, shape.hidden)),
      d_act_(sorted_rows(shape, shape.ffn)),
      dgate_up_(sorted_rows(shape, 2 * shape.ffn)) {}

void ExpertGradients::add_tables(MoePermutation& permutation, int d_act_table) const {
  permutation.tables[permutation.table_count++] = to_inner_->table(d_act_table);
  permutation.tables[permutation.table_count++] = to_x_->table();
}

void ExpertGradients::multiply_d_act(const void* w_out, int table, const uint32_t* ready,
                                     cudaStream_t stream) {
  to_inner_->launch({.x = dout_.data(), .weight = w_out, .out = d_act_.data(), .ready = ready},
                    stream, table);
}

void ExpertGradients::gate(const SortedRows& rows, const MoeSaved& saved,
                           const int32_t* routing_idx, const float* weights, float* d_gate_weight,
                           cudaStream_t stream) {
  launch_gate_backward(rows,
                       {.gate_up = saved.gate_up.data(),
                        .d_act = d_act_.data(),
                        .routing_idx = routing_idx,
                        .weights = weights,
                        .d_gate_weight = d_gate_weight,
                        .scaled = d_act_.data(),
                        .dgate_up = dgate_up_.data(),
                        .ffn = shape_.ffn},
                       stream);
}

void ExpertGradients::multiply_dx(const void* w_in, cudaStream_t stream) {
  to_x_->launch({.x = dgate_up_.data(), .weight = w_in, .out = dx_.data()}, stream);
}

void ExpertGradients::write_dw_in(const SortedRows& rows, const MoeSaved& saved,
                                  const Tensor& dw_in, bool stores, cudaStream_t stream) {
  of_in_->launch({.dy = dgate_up_.data(),
                  .x = saved.x.data(),
                  .group_rows = rows.group_rows,
                  .dweight = dw_in.data(),
                  .dtype = dw_in.dtype(),
                  .stores = stores},
                 stream);
}

void ExpertGradients::write_dw_out(const SortedRows& rows, const Tensor& dw_out, bool stores,
                                   cudaStream_t stream) {
  of_out_->launch({.dy = dout_.data(),
                   .x = d_act_.data(),
                   .group_rows = rows.group_rows,
                   .dweight = dw_out.data(),
                   .dtype = dw_out.dtype(),
                   .stores = stores},
                  stream);
}

}  // namespace tandem::gpu
