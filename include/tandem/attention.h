// Context-parallel attention: every rank has some rows of whole sequences, and gets the attention
// of its queries over the keys of all ranks. Causal self-attention with rotary embedding, grouped
// heads, sliding windows and documents, or cross-attention without a mask, whose keys may have
// another length. Forms differ in what is sent: keys and values (`gather`, which is serial, and
// `ring`), heads (`heads`: Ulysses, arXiv 2309.14509), or queries and partial results (`queries`:
// LV-XAttn, arXiv 2502.02406, section 3).
//
// Construction is collective and chooses a form for each pass; runs allocate nothing. Sums are in
// f32, in one order: the same bits on every run and in every form. They differ from those of
// another number of ranks within rounding. A rank may have no rows. Calls are in one order on all
// ranks. An operator must be destroyed before its communicator, unless that belongs to a World. CPU
// ranks. Forms, bytes and memory: docs/reference/operators.md.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/strategy.h"
#include "tandem/tensor.h"

namespace tandem {
class ContextOnRanks;  // internal
}

TANDEM_API_BEGIN
namespace tandem {

/// Positions of a rank's rows of a sequence, in order: those of the head, then those of the tail.
struct ContextChunks {
  Shard head, tail;
  int64_t count() const { return head.count + tail.count; }
  /// Position of row `row` in [0, count()).
  int64_t position(int64_t row) const {
    return row < head.count ? head.begin + row : tail.begin + row - head.count;
  }
};
/// Rows of `rank` of `ranks`, of a sequence of `positions`. Chunks `rank` and 2 x ranks - 1 - rank
/// of 2 x ranks, which balances causal attention; contiguous: shard_of(positions, ranks, rank).
/// Chunks differ by at most one row and may be empty. Throws InvalidArgument for a rank out of
/// range or negative positions.
ContextChunks context_chunks(int64_t positions, int ranks, int rank, bool contiguous = false);

struct ContextAttentionOptions {
  Strategy strategy = Strategy::automatic;  ///< overlapped: the fastest form that overlaps
  std::string_view form = {};  ///< gather, ring, heads or queries, in both passes; empty: chosen
  bool backward = true;        ///< backward passes will run
  bool strict = false;         ///< as of OverlapOptions; `form` asks for its own strategy
};

class ContextAttention {
 public:
  struct Shape {
    int64_t batch = 1;         ///< sequences; every rank has rows of each
    int64_t seq = 0;           ///< positions of queries over all ranks, at least 1
    int64_t keys = 0;          ///< positions of keys over all ranks; 0: seq
    int64_t heads = 1;         ///< of queries; a multiple of kv_heads
    int64_t kv_heads = 1;      ///< of keys and values; head h reads h / (heads / kv_heads)
    int64_t head_dim = 0;      ///< even
    DType dtype = DType::f32;  ///< of all rows: f32 or bf16
    bool causal = true;        ///< needs keys == seq; false: every query reads every key
    bool contiguous = false;   ///< as of context_chunks
    int64_t window = 0;        ///< causal: a query reads at most so many keys; 0: all before it
    /// Base of the rotary embedding (10000 in most models), by which queries and keys are rotated
    /// at their position in the sequence or document; 0: they are not rotated.
    double rope_theta = 0;
  };

  /// Collective. Throws InvalidArgument for a shape or form that is impossible, Mismatch on all
  /// ranks, which names two of them and what they passed, if ranks differ, Unsupported on GPU
  /// ranks, and on all if `strict` forbids what would run.
  ContextAttention(Communicator& comm, const Shape& shape,
                   const ContextAttentionOptions& options = {});
  ~ContextAttention();
  ContextAttention(ContextAttention&&) noexcept;
  ContextAttention& operator=(ContextAttention&&) noexcept;

  /// Positions of this rank's rows of q and out, and of k and v.
  ContextChunks query_chunks() const;
  ContextChunks key_chunks() const;

  /// Collective. Row b * query_chunks().count() + i of q and out [rows, heads * head_dim] is row i
  /// of sequence b; k and v [rows, kv_heads * head_dim] have the rows of key_chunks() likewise.
  /// Rows are dense and may be part of a wider matrix. log_sums: f32 [batch * heads, rows of a
  /// sequence], the logarithms of the sums of exponentials, for `backward`. `document_starts`: i32
  /// [1, batch * seq], equal on all ranks: the position at which each position's document begins;
  /// nullptr: a sequence is one document. Throws InvalidArgument, which names the operand, before
  /// anything is sent; Timeout, Aborted.
  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& log_sums, const Tensor* document_starts = nullptr);
  /// Collective. Takes what `forward` took and wrote. Overwrites dq, dk and dv, of the shapes of q,
  /// k and v. dk and dv are those of this rank's keys by the queries of all ranks.
  void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                const Tensor& log_sums, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                const Tensor& dv, const Tensor* document_starts = nullptr);

  /// Names of the forms that run: "ring"; "local" on one rank, if causal with a rotary embedding.
  /// Empty: no backward pass.
  std::string_view forward_form() const;
  std::string_view backward_form() const;
  /// Bytes that this rank sends in a pass, by formula: what Communicator::bytes_sent counts.
  int64_t forward_bytes() const;
  int64_t backward_bytes() const;

 private:
  std::unique_ptr<ContextOnRanks> impl_;
};

}  // namespace tandem
TANDEM_API_END
