// One overlap operator on one kind of rank, and what all operators share: the check of a call, the
// agreement between ranks, and the choice among the candidates. The public classes own one of
// these.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/call_card.h"
#include "comm/progress.h"
#include "overlap/contract/communicator_owner.h"
#include "overlap/contract/receipt.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"
#include "tune/tuner.h"

namespace tandem {

class OverlapOperator : public CommunicatorOwner {
 public:
  virtual ~OverlapOperator() = default;
  OverlapOperator(const OverlapOperator&) = delete;
  OverlapOperator& operator=(const OverlapOperator&) = delete;

  /// Checks the operands, once, and runs the chosen candidate. Throws InvalidArgument if they
  /// contradict the descriptor.
  void run(const Operands& operands);
  /// Serial first. A caller that runs one directly must pass valid operands.
  const std::vector<Candidate>& candidates() const { return candidates_; }
  const Candidate& chosen() const { return candidates_[chosen_]; }
  const OpDesc& desc() const { return desc_; }
  const Receipt& receipt() const { return *receipt_; }
  /// Throws InvalidArgument unless the operator has keep_gathered.
  virtual Tensor gathered() const;

 protected:
  OverlapOperator(const Communicator& comm, const OpDesc& desc, const OverlapOptions& options);
  virtual void check(const Operands& operands) const = 0;
  /// Keeps the reasons of those that cannot run, for the receipt.
  void note_refusals(const std::vector<Candidate>& all);
  /// Chooses among `candidates_`. Throws Unsupported if that is not as asked, and strict.
  void choose_by(const Choice& choice);

  OpDesc desc_;
  std::vector<Candidate> candidates_;

 private:
  const bool strict_;
  size_t chosen_ = 0;
  std::string refusals_;
  std::shared_ptr<Receipt> receipt_;
};

/// Checks common to CPU and GPU ranks: throws InvalidArgument if the bias or the weight's layout
/// differs from the shape, if an output is read-only, or if it overlaps another operand, except a
/// residual that hidden replaces exactly.
void check_call(const OpDesc& desc, const Operands& operands);
/// For CPU ranks: check_call, and throws unless all operands match `desc`.
void check_operands(const OpDesc& desc, const Operands& operands);

/// "ag_gemm m 64, n 32, k 48, operator 2": equal on all ranks. Counts the operators of `comm`.
std::string name_on_card(Communicator& comm, const OpDesc& desc);
/// Registers operands, so that ranks of one process can detect writes to each other's.
void use_operands(CallOnCard& call, const OpDesc& desc, const Operands& operands);

/// Collective: throws before anything is allocated.
void agree(Communicator& comm, const OpDesc& desc, const OverlapOptions& options);
/// Collective, CPU ranks: the candidate that `options` select; measured on scratch operands if
/// several remain.
Choice choose_candidate(Communicator& comm, const OpDesc& desc, const OverlapOptions& options,
                        const std::vector<Candidate>& candidates);

/// `first`: nothing is measured, for callers that run all candidates.
enum class Choosing { fastest, first };

/// Operator run by `Cpu`, which is constructed from the communicator and the descriptor, and lists
/// its candidates for the chunk counts of the overlapped ones.
template <typename Cpu>
class CpuOperator final : public OverlapOperator {
 public:
  CpuOperator(Communicator& comm, const OpDesc& desc, const OverlapOptions& options,
              Choosing choosing)
      : OverlapOperator((agree(comm, desc, options), comm), desc, options),
        progress_(comm, desc.op),
        cpu_(comm, desc) {
    const std::string name = name_on_card(comm, desc_);
    candidates_ = cpu_.candidates(chunk_counts(desc.op, options, desc.chunk_rows));
    for (Candidate& candidate : candidates_) {
      candidate.run = [this, &comm, name,
                       run = std::move(candidate.run)](const Operands& operands) {
        CallOnCard call(comm, name);
        use_operands(call, desc_, operands);
        progress_.during([&] {
          call.require_apart(desc_.op);
          run(operands);
        });
      };
    }
    if (choosing == Choosing::first) return;
    choose_by(choose_candidate(comm, desc, options, candidates_));
  }
  Tensor gathered() const override {
    if constexpr (requires { cpu_.gathered(); }) {
      if (desc_.keep_gathered) return cpu_.gathered();
    }
    return OverlapOperator::gathered();
  }

 private:
  void check(const Operands& operands) const override { check_operands(desc_, operands); }

  Progress progress_;
  Cpu cpu_;
};

/// The operator owned by a public class. Throws InvalidArgument naming `op` if it was moved from.
OverlapOperator& operator_of(const std::unique_ptr<OverlapOperator>& impl, std::string_view op);
Strategy strategy_of(const std::unique_ptr<OverlapOperator>& impl, std::string_view op);

}  // namespace tandem
