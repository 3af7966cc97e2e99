// A Mixture-of-Experts layer on one kind of rank, owned by a public MoeLayer.
#pragma once

#include <functional>
#include <memory>

#include "overlap/contract/communicator_owner.h"
#include "overlap/moe/rows.h"
#include "tandem/moe.h"

namespace tandem {

class MoeOnRanks : public CommunicatorOwner {
 public:
  MoeOnRanks() = default;
  virtual ~MoeOnRanks() = default;
  MoeOnRanks(const MoeOnRanks&) = delete;
  MoeOnRanks& operator=(const MoeOnRanks&) = delete;

  // As in MoeLayer.
  virtual void prepare(MoeRows& rows) = 0;
  virtual void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out, MoeRows& rows,
                       const std::function<void()>& meanwhile) = 0;
  virtual void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                        const MoeRows& rows, const Tensor& dx, const Tensor& dweights,
                        const Tensor& dw_in, const Tensor& dw_out, WeightGradients gradients,
                        const std::function<void()>& meanwhile) = 0;
  virtual Strategy dispatch_strategy() const = 0;
  virtual Strategy combine_strategy() const = 0;
  virtual int64_t dropped_routings() const = 0;
};

/// Collective: the layer on GPU ranks.
std::unique_ptr<MoeOnRanks> make_gpu_moe(Communicator& comm, const MoeShape& shape,
                                         const MoeOptions& options);

}  // namespace tandem
