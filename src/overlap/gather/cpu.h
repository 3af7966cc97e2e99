// The gather that AG+GEMM and its weight gradient overlap with their GEMMs.
#pragma once

#include "collectives/rows/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "schedule/ring.h"
#include "tune/op_desc.h"

namespace tandem {

/// The [m, k] rows of all ranks, arriving chunk by chunk. In the descriptor's wire format each rank
/// encodes its rows once; all ranks, including their owner, get the decoded rows.
class ShardGather {
 public:
  /// Uses m, k, dtype and wire of the descriptor.
  ShardGather(Communicator& comm, const OpDesc& desc);

  /// Starts a run: sends `x`, this rank's rows, to every peer, in `chunks` transfers. Serial,
  /// gathering and encoded runs have a copy of it in `all()`; `local()` is the tensor to read.
  /// `encoded`: in the wire format; requires more than one rank.
  void begin(int chunks, const Tensor& x, bool keep, bool encoded = false);
  /// Returns once chunk `chunk` of `owner`'s rows has arrived and is decoded. Must be called once
  /// per chunk in a run.
  void await(int chunks, int owner, int chunk);
  /// Ends the run: `x` may change afterwards.
  void end();
  Tensor all() const;
  Tensor local() const { return local_; }

 private:
  int signal(int owner, int chunk) const { return owner * kMaxChunks + chunk; }

  schedule::Range rows_of(int chunks, int owner, int chunk) const;
  /// Offset of a chunk's messages in the shared memory.
  size_t messages_at(int chunks, int owner, int chunk) const;
  void send(int chunks, const Tensor& x, bool keep);
  void send_encoded(int chunks, const Tensor& x);

  int rank_, world_;
  int64_t m_, k_;
  DType dtype_;
  bool is_exact_;
  RowMessages messages_;
  size_t area_;                 ///< max message bytes from one owner
  OverlapWorkspace workspace_;  ///< shared: [m][k], or messages by owner
  Memory decoded_;              ///< with a wire format: [m][k]
  Tensor local_;
  bool encoded_ = false, flush_ = false;
};

}  // namespace tandem
