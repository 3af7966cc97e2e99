// Context-parallel attention: every rank has some rows of whole sequences (schedule/context.h), and
// gets the attention of its queries over the keys of all ranks. Causal self-attention with rotary
// embedding, grouped heads, sliding windows and documents, or cross-attention without a mask, whose
// keys may have another length.
//
// Candidates differ in what travels: `gather` (serial) and `ring` send keys and values. They give
// the same bits, forward and backward, on every run; the tuner chooses one per pass. A world of one
// rank runs the local attention, with its bits.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/progress.h"
#include "overlap/attention/form.h"
#include "overlap/contract/communicator_owner.h"
#include "overlap/contract/receipt.h"
#include "tune/candidate.h"

namespace tandem {

struct ContextOptions {
  Strategy strategy = Strategy::automatic;
  std::string_view form = {};  ///< name of the candidate for both passes; empty: chosen
  bool backward = true;        ///< backward passes will run: their candidate is chosen, too
};

using ContextForwardCandidate = CandidateOf<const ContextForward&>;
using ContextBackwardCandidate = CandidateOf<const ContextBackward&>;

/// Owns its memory; runs allocate nothing. CPU ranks.
class ContextAttention : public CommunicatorOwner {
 public:
  /// Collective. `rope` rotates queries and keys by position, must outlive this and cover seq
  /// positions; nullptr: nothing is rotated. Throws InvalidArgument for an impossible shape, an
  /// unknown form or one that the shape excludes, Mismatch if ranks differ in them, Unsupported on
  /// GPU ranks.
  ContextAttention(Communicator& comm, const ContextShape& shape, const RopeTable* rope,
                   const ContextOptions& options = {});
  ~ContextAttention();

  /// Positions of this rank's rows of q and out, and of k and v.
  schedule::ContextRows query_rows() const { return grid_.queries(grid_.rank); }
  schedule::ContextRows key_rows() const { return grid_.keys(grid_.rank); }

  /// Collective; operands as ContextForward's, of the shape's dtype, which q, k and v keep. The
  /// mask is equal on all ranks: document_starts are those of whole sequences, [1, batch * seq].
  /// Without `causal` it must be empty. Throws InvalidArgument before anything is sent.
  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& log_sums, const AttentionMask& mask = {});
  /// Collective. Takes what `forward` took and wrote, and the same mask. Overwrites dq, dk and dv.
  void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                const Tensor& log_sums, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                const Tensor& dv, const AttentionMask& mask = {});

  /// Candidates that can run, serial first. A caller that runs one directly must pass valid
  /// operands. With a choice made, only the chosen ones remain.
  const std::vector<ContextForwardCandidate>& forward_candidates() const { return forward_; }
  const std::vector<ContextBackwardCandidate>& backward_candidates() const { return backward_; }

 private:
  void check(const ContextForward& call) const;
  void check(const ContextBackward& call) const;
  void check_mask(const AttentionMask& mask) const;
  void check_rows_of(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) const;

  Communicator& comm_;
  ContextGrid grid_;
  Progress progress_;
  std::string card_;
  std::unique_ptr<Attention> local_;  ///< one rank, causal
  std::vector<std::unique_ptr<ContextForm>> forms_;
  std::vector<ContextForwardCandidate> forward_;
  std::vector<ContextBackwardCandidate> backward_;
  size_t chosen_forward_ = 0, chosen_backward_ = 0;
  std::shared_ptr<Receipt> forward_receipt_, backward_receipt_;
};

/// All forms, serial first.
std::span<const ContextFormRow* const> context_forms();

}  // namespace tandem
