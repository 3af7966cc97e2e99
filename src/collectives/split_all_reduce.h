// An all-reduce of rows of partial products in two parts: between `send` and `finish` a rank
// computes something else while its rows travel.
//
// On two ranks each sends all its rows to the other, which is as many bytes as two shots; on more,
// to each row's owner, who sends the sum to all. With a wire format that loses bits every part is
// encoded, a rank's own too, and every row is a message: so a row's sum has the same bits on every
// rank, and however many rows are summed with it.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "tandem/codec.h"
#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class RowSums {
 public:
  /// Collective. Up to `most_rows` rows of `columns` elements of `dtype`, plain or in one of
  /// `wires`.
  RowSums(Communicator& comm, DType dtype, int64_t most_rows, int64_t columns,
          const std::vector<Wire>& wires);

  /// Begins the next sum: where this rank's rows go, dense [rows, columns]. All ranks sum as many.
  Tensor begin(int64_t rows);
  /// Once they stand there.
  void send(const Wire& wire);
  /// Goes on with what has arrived, where there is something to do before `finish`. Never waits.
  void advance();
  /// Waits, and leaves the sums in `out`: added in f32 in the order of the ranks, rounded once
  /// (with a format that loses bits on more than two ranks, encoded once more).
  void finish(const Tensor& out);

 private:
  int partial_signal(int source) const { return source; }
  int sum_signal(int owner) const { return world_ + owner; }
  Shard share(int owner) const { return shard_of(rows_, world_, owner); }
  bool is_one_shot() const { return world_ == 2; }
  /// Room for so many rows, plain or encoded.
  size_t room(int64_t rows) const;
  Tensor partial(const Shard& rows) const;
  const RowMessages& messages() const { return messages_[wire_]; }
  bool is_encoded() const { return !wires_[wire_].is_none(); }
  bool is_lossy() const { return !wires_[wire_].is_exact(); }

  /// The rows as they cross, in `to` where they are encoded, else where they are.
  const std::byte* packed(const Tensor& rows, std::byte* to, size_t& bytes) const;
  /// The rows that a message stands for: those of `source`, in memory of this rank's.
  const std::byte* unpacked(const std::byte* message, int64_t rows, int source);
  void send_rows(int peer, const Shard& rows);
  void sum_own();
  void sum_arrived(const Shard& rows, const Tensor& out);

  const int rank_, world_;
  const DType dtype_;
  const int64_t columns_;
  const size_t line_;
  std::vector<Wire> wires_;  ///< the first is none
  std::vector<RowMessages> messages_;
  const size_t area_;  ///< of what one rank sends another, and of one owner's sums
  const size_t encoded_at_;
  /// shared: [source][area], [owner][area]; scratch: partial rows, [owner][area] encoded.
  OverlapWorkspace workspace_;
  Buffer decoded_;  ///< [source][rows of a transfer]
  Buffer sums_;     ///< of this rank's share
  std::vector<const std::byte*> parts_;
  int64_t rows_ = 0;
  size_t wire_ = 0;
  bool is_summed_ = false;  ///< this rank's share, in this call
};

}  // namespace tandem
