// Dense operators on GPU ranks: agreement of the ranks, and the choice among the candidates.
#pragma once

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "overlap/contract/cuda/dense.h"
#include "overlap/contract/cuda/encoded.h"
#include "overlap/contract/operator.h"

namespace tandem::gpu {

/// Candidates of `all` that can run, and on one rank, which has nothing to overlap, are serial.
std::vector<Candidate> usable(const GpuCommunicator& comm, std::vector<Candidate> all);
/// Collective: `all`, with only the fastest candidate of each family, from the tuner's times or
/// measured on scratch operands.
std::vector<Candidate> family_leaders(GpuCommunicator& comm, const OpDesc& desc,
                                      const std::vector<Candidate>& all);

/// Encoded candidates, if the descriptor has a wire format, and the choice among all.
class DenseOperator : public OverlapOperator {
 protected:
  DenseOperator(GpuCommunicator& comm, const OpDesc& desc, const OverlapOptions& options,
                MakeFusedEncoded make_fused);
  bool has_uncompressed() const { return !encoded_ || desc_.allow_uncompressed; }
  OpDesc uncompressed() const;
  /// Chooses among the candidates of `options`; `all`: the uncompressed ones.
  void choose(const OverlapOptions& options, std::vector<Candidate> all);

  GpuCommunicator& comm_;
  std::optional<EncodedDense> encoded_;

 private:
  void check(const Operands& operands) const override { check_operands(comm_, desc_, operands); }
};

/// Operator whose uncompressed candidates are those of `Op`.
template <typename Op>
class GpuOperator final : public DenseOperator {
 public:
  GpuOperator(GpuCommunicator& comm, const OpDesc& desc, const OverlapOptions& options,
              MakeFusedEncoded make_fused)
      : DenseOperator(comm, desc, options, make_fused) {
    std::vector<Candidate> all;
    if (has_uncompressed()) {
      if constexpr (std::is_constructible_v<Op, GpuCommunicator&, const LtContext&, const OpDesc&,
                                            Strategy>) {
        op_.emplace(comm, lt_context(comm), uncompressed(), options.strategy);
      } else {
        op_.emplace(comm, lt_context(comm), uncompressed());
      }
      all = op_->candidates();
    }
    choose(options, std::move(all));
    if constexpr (requires { op_->settle_on(chosen()); }) {
      if (op_) op_->settle_on(chosen());
    }
  }
  Tensor gathered() const override {
    if constexpr (requires { op_->gathered(); }) {
      if (desc_.keep_gathered) return chosen().encoded ? encoded_->gathered() : op_->gathered();
    }
    return OverlapOperator::gathered();
  }

 private:
  std::optional<Op> op_;
};

/// Checks `options`, and that ranks agree on everything that decides on the candidates.
void agree_on_candidates(GpuCommunicator& comm, const OpDesc& desc, const OverlapOptions& options);

/// Forms of an operator besides its uncompressed ones on one node.
struct GpuForms {
  /// The operator for ranks that reach only their own memory.
  std::unique_ptr<OverlapOperator> (*make_across_nodes)(GpuCommunicator&, const OpDesc&,
                                                        const OverlapOptions&);
  MakeFusedEncoded make_fused_encoded = nullptr;  ///< null: none
};

/// Collective: the operator that `Op` implements on one node, on GPU ranks.
template <typename Op>
std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator& any, const OpDesc& desc,
                                                   const OverlapOptions& options,
                                                   const GpuForms& forms) {
  GpuCommunicator& comm = as_gpu(any);
  agree_on_candidates(comm, desc, options);
  if (!comm.one_node()) return forms.make_across_nodes(comm, desc, options);
  return std::make_unique<GpuOperator<Op>>(comm, desc, options, forms.make_fused_encoded);
}

}  // namespace tandem::gpu
