// An MoE layer on GPU ranks as its caller owns it. All layers of a communicator with the same shape
// and options share one operator (MoeOnGpus): its scratch and symmetric memory, which a call needs
// only while it runs, its work tables, and the chosen candidate. A model of many layers thus needs
// that memory once; each layer owns only its batches.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/on_ranks.h"

namespace tandem::gpu {

class SharedMoe final : public MoeOnRanks {
 public:
  /// Collective.
  SharedMoe(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options);

  void prepare(MoeRows& rows) override { op_->prepare(rows); }
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeRows& rows, const std::function<void()>& meanwhile) override {
    if (meanwhile) meanwhile();
    op_->forward(layer_, x, routing, w_in, w_out, out, rows);
  }
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeRows& rows,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in, const Tensor& dw_out,
                WeightGradients gradients, const std::function<void()>& meanwhile) override {
    if (meanwhile) meanwhile();
    op_->backward(layer_, dout, w_in, w_out, rows, dx, dweights, dw_in, dw_out, gradients);
  }
  Strategy dispatch_strategy() const override { return op_->strategy(); }
  Strategy combine_strategy() const override { return op_->strategy(); }
  int64_t dropped_routings() const override { return op_->dropped_routings(layer_); }

 private:
  std::shared_ptr<MoeOnGpus> op_;
  MoeOfLayer layer_;
};

}  // namespace tandem::gpu
