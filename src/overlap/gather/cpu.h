// The gather that AG+GEMM and its weight gradient run beside their products.
#pragma once

#include "collectives/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "schedule/ring.h"
#include "tune/op_desc.h"

namespace tandem {

/// The [m, k] rows of all ranks, arriving chunk by chunk. In the descriptor's wire format each rank
/// encodes its rows once; all ranks, their owner too, get them as they decode.
class ShardGather {
 public:
  /// Of the descriptor's operator, m, k, dtype and wire.
  ShardGather(Communicator& comm, const OpDesc& desc);

  /// Starts a run: sends `x`, this rank's rows, to every peer, in `chunks` transfers. Serial,
  /// gathering and encoded runs have a copy of it in `all()`; `own()` is where to read it.
  /// `encoded`: in the wire format; for more than one rank.
  void begin(int chunks, const Tensor& x, bool keep, bool encoded = false);
  /// Returns once chunk `chunk` of `owner`'s rows is here and decoded: once for each in a run.
  void await(int chunks, int owner, int chunk);
  /// Ends the run: `x` may change.
  void end();
  Tensor all() const;
  Tensor own() const { return own_; }

 private:
  int signal(int owner, int chunk) const { return owner * kMaxChunks + chunk; }

  schedule::Range rows_of(int chunks, int owner, int chunk) const;
  /// Where the messages of a chunk begin in the shared memory.
  size_t messages_at(int chunks, int owner, int chunk) const;
  void send(int chunks, const Tensor& x, bool keep);
  void send_encoded(int chunks, const Tensor& x);

  int rank_, world_;
  int64_t m_, k_;
  DType dtype_;
  bool is_exact_;
  RowMessages messages_;
  size_t area_;                 ///< bytes of messages that one owner may leave here
  OverlapWorkspace workspace_;  ///< shared: [m][k], or messages by owner
  Buffer decoded_;              ///< with a wire: [m][k]
  Tensor own_;
  bool encoded_ = false, flush_ = false;
};

}  // namespace tandem
