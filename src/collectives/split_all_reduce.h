// Two-part all-reduce of rows of partial sums: between `send` and `finish` a rank computes
// something else during the transfer.
//
// With two ranks each sends all its rows to the other, as many bytes as two shots; with more, to
// each row's owner, which sends the sum to all. With a lossy wire format every contribution is
// encoded, including the local one, and every row is a message, so a row's sum has the same bits on
// every rank, and however many rows are summed with it.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/rows/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "tandem/codec.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class RowSums {
 public:
  /// Collective. Up to `max_rows` rows of `columns` elements of `dtype`, uncompressed or in one of
  /// `wires`.
  RowSums(Communicator& comm, DType dtype, int64_t max_rows, int64_t columns,
          const std::vector<Wire>& wires);

  /// Starts the next sum: returns the buffer for this rank's rows, dense [rows, columns]. `rows`
  /// must be equal on all ranks.
  Tensor begin(int64_t rows);
  /// Sends the rows; call once they are written.
  void send(const Wire& wire);
  /// Processes arrived rows, if there is work to do before `finish`. Never waits.
  void advance();
  /// Waits, and writes the sums to `out`: added in f32 in rank order, rounded once (with a lossy
  /// format on more than two ranks, encoded once more).
  void finish(const Tensor& out);

 private:
  int partial_signal(int source) const { return source; }
  int sum_signal(int owner) const { return world_ + owner; }
  Shard share(int owner) const { return shard_of(rows_, world_, owner); }
  bool is_one_shot() const { return world_ == 2; }
  /// Bytes for `rows` rows, uncompressed or encoded.
  size_t room(int64_t rows) const;
  Tensor partial(const Shard& rows) const;
  const RowMessages& messages() const { return messages_[wire_]; }
  bool is_encoded() const { return !wires_[wire_].is_none(); }
  bool is_lossy() const { return !wires_[wire_].is_exact(); }

  /// The rows in wire format: encoded in `to`, or in place if uncompressed.
  const std::byte* packed(const Tensor& rows, std::byte* to, size_t& bytes) const;
  /// Decoded rows of a message from `source`, in this rank's memory.
  const std::byte* unpacked(const std::byte* message, int64_t rows, int source);
  void send_rows(int peer, const Shard& rows);
  void sum_local();
  void sum_arrived(const Shard& rows, const Tensor& out);

  const int rank_, world_;
  const DType dtype_;
  const int64_t columns_;
  const size_t row_bytes_;
  std::vector<Wire> wires_;  ///< the first is none
  std::vector<RowMessages> messages_;
  const size_t area_;  ///< bytes of a transfer between two ranks, and of one owner's sums
  const size_t encoded_at_;
  /// shared: [source][area], [owner][area]; scratch: partial sums, [owner][area] encoded.
  OverlapWorkspace workspace_;
  Memory decoded_;  ///< [source][rows of a transfer]
  Memory sums_;     ///< sums of this rank's share
  std::vector<const std::byte*> partials_;
  int64_t rows_ = 0;
  size_t wire_ = 0;
  bool is_summed_ = false;  ///< true once this rank's share is summed in this call
};

}  // namespace tandem
