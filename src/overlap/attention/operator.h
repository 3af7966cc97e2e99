// Context-parallel attention: every rank has some rows of whole sequences (schedule/context.h), and
// gets the attention of its queries over the keys of all ranks. Causal self-attention with rotary
// embedding, grouped heads, sliding windows and documents, or cross-attention without a mask, whose
// keys may have another length.
//
// Candidates differ in what travels: keys and values (`gather`, serial, and `ring`), heads
// (`heads`), or queries and their results (`queries`). All give the same bits, forward and
// backward, on every run; the tuner chooses one for each pass. A world of one rank runs the local
// attention, with its bits, if it is causal and rotates; options.form is then only checked.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/progress.h"
#include "overlap/attention/form.h"
#include "overlap/contract/communicator_owner.h"
#include "overlap/contract/receipt.h"
#include "tune/candidate.h"

namespace tandem {

struct ContextOptions {
  Strategy strategy = Strategy::automatic;  ///< overlapped: the fastest of those that overlap
  std::string_view form = {};  ///< name of the candidate for both passes; empty: chosen
  bool backward = true;        ///< backward passes will run: their candidate is chosen, too
  int64_t window = 0;          ///< of most calls, with which candidates are measured
  bool strict = false;         ///< as of OverlapOptions; `form` asks for its own strategy
};

/// Owns its memory; runs allocate nothing. CPU ranks.
class ContextOperator : public CommunicatorOwner {
 public:
  /// Collective. `rope` rotates queries and keys by position, must outlive this and cover
  /// the positions of queries and keys; nullptr: nothing is rotated. Throws InvalidArgument for an
  /// impossible shape, an unknown form or one that the shape excludes, Mismatch on all ranks if
  /// they differ in them, also in whether they are possible, Unsupported on GPU ranks.
  ContextOperator(Communicator& comm, const ContextShape& shape, const RopeTable* rope,
                  const ContextOptions& options = {});
  ~ContextOperator();

  /// Rows of all ranks.
  const ContextGrid& grid() const { return grid_; }
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

  /// Throws InvalidArgument if the mask contradicts the shape; does not read document_starts.
  void check_mask(const AttentionMask& mask) const;

  /// Names of the candidates that run: "ring"; "local" on one rank.
  std::string_view forward_form() const { return forward_.chosen.name; }
  std::string_view backward_form() const { return backward_.chosen.name; }
  /// Bytes that this rank sends in a pass of the constructor's window.
  int64_t sent_bytes(ContextPass pass) const;

 private:
  /// Chosen candidate of a pass, which keeps its form alive.
  template <typename Call>
  struct Pass {
    CandidateOf<const Call&> chosen = {};
    std::shared_ptr<Receipt> receipt = {};
    const ContextFormRow* row = nullptr;
  };
  template <typename Call>
  Pass<Call> choose_form(std::string_view name, std::span<const std::shared_ptr<ContextForm>> forms,
                         std::span<const ContextFormRow* const> rows, const ContextOptions& options,
                         const std::string& refusals, const Call& sample);

  void check(const ContextForward& call) const;
  void check(const ContextBackward& call) const;
  void check_rows_of(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) const;

  Communicator& comm_;
  ContextGrid grid_;
  int64_t window_;
  Progress progress_;
  std::string card_;
  Pass<ContextForward> forward_;
  Pass<ContextBackward> backward_;
};

/// Bytes that an operator of `ranks` ranks has at most, once it has chosen: the forms of both
/// passes. While it measures it has all forms, and operands like its calls'. Throws as the
/// constructor does.
size_t context_attention_bytes(const ContextShape& shape, int ranks,
                               const ContextOptions& options = {});

/// All forms, serial first.
std::span<const ContextFormRow* const> context_forms();

}  // namespace tandem
