// A Mixture-of-Experts layer on one kind of rank, owned by a public MoeLayer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "overlap/contract/communicator_owner.h"
#include "overlap/contract/receipt.h"
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

  /// Counts a call. Throws Unsupported if the layer is strict and backward passes are not as asked.
  void count_forward() { ++forward_->calls; }
  void count_backward();
  /// Receipts of the forward pass, and of the backward pass if it can run; choices for evenly
  /// spread rows.
  std::vector<Receipt> receipts() const;

 protected:
  /// Lists the receipts. Throws Unsupported if the layer is strict and a pass of `options` is not
  /// as asked.
  void list(const Receipt& forward, const std::optional<Receipt>& backward,
            const MoeOptions& options);

 private:
  bool strict_ = false;
  std::shared_ptr<Receipt> forward_, backward_;  ///< null: no such pass
};

/// Receipt of `pass`, "moe" or "moe backward", without a choice.
Receipt make_moe_receipt(const char* pass, const MoeRankCoords& coords, const MoeOptions& options);

/// Collective: the layer on GPU ranks.
std::unique_ptr<MoeOnRanks> make_gpu_moe(Communicator& comm, const MoeShape& shape,
                                         const MoeOptions& options);

}  // namespace tandem
