// Combine of expert results on CPU ranks: one group of columns of all remote rows is sent while the
// next is computed, rows that stay local come last, and the owner adds the ranks' partial sums in
// rank order.
//
// A run's shared memory has, for every rank, room for a partial sum of each row of this rank, one
// group of columns after another, so that a group from one rank to another is one put.
//
// With a wire format every row of a group of columns is a message (lossless: all of them). Groups
// are split between whole blocks of the format, so that decoded values do not depend on their
// number. The owner adds its local partial sums uncompressed.
#pragma once

#include <functional>
#include <vector>

#include "collectives/rows/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "overlap/moe/rows.h"
#include "schedule/moe_pass.h"

namespace tandem {

class MoeGemmCombineCpu {
 public:
  /// `wire`: of encoded plans.
  MoeGemmCombineCpu(Communicator& comm, const MoeRankCoords& coords, const Wire& wire);

  /// Writes columns of a local expert's GEMM for its slots: f32 [slots, columns].
  using Product = std::function<void(int expert, schedule::Range slots, schedule::Range columns,
                                     const Tensor& y)>;
  struct Call {
    const MoeRows& rows;
    bool weighted = true;  ///< by the routing's weights; else unweighted sums
    Product product;
    Tensor out;                               ///< [local rows, hidden]
    std::span<const float> slot_values = {};  ///< one per slot, returned in ...
    Tensor row_values = {};                   ///< ... f32 [local rows, top_k]; no elements: none
  };

  // Steps of a pass (schedule/moe_pass.h). The chunks of a plan are column groups.

  void begin() { workspace_.begin(); }
  /// Multiplies and, but for remote rows, sums. `group`: of remote rows, whose other columns are
  /// not computed.
  void multiply(const OverlapOptions& plan, const Call& call, schedule::RowsFrom from, int group);
  /// Sends the sums of remote rows, which an overlapped plan adds up here. With group 0 go the
  /// values of the slots, also to this rank.
  void send_sums(const OverlapOptions& plan, const Call& call, int group);
  void sum_ranks(const OverlapOptions& plan, const Call& call);

 private:
  int values_signal(int source) const { return source * (1 + kMaxChunks); }
  int group_signal(int source, int group) const { return values_signal(source) + 1 + group; }
  /// Offset of `columns` of `rows` rows in a rank's sums.
  size_t offset_in_sums(int64_t rows, schedule::Range columns) const;
  std::byte* decoded_sums(int source) const;
  /// Offset of rank `of`'s sums of `columns` of `rows` rows.
  size_t offset(int of, int64_t rows, schedule::Range columns) const;
  size_t values_offset(int of) const;
  void send_values(const Call& call);
  void take_values(const Call& call);
  void multiply_groups(const Call& call, schedule::Range groups, schedule::Range columns);
  void add_up(const Call& call, int source, schedule::Range columns);
  void decode(const OverlapOptions& plan, const Call& call, int group);
  void reduce(const OverlapOptions& plan, const Call& call, int group);
  schedule::Range columns_of(const OverlapOptions& plan, int group) const;
  RowMessages messages_of(const schedule::Range& columns) const;
  /// Offset of the messages of a group among those of `rows` rows.
  size_t messages_before(const OverlapOptions& plan, int64_t rows, int group) const;
  size_t max_message_bytes() const;

  MoeRankCoords coords_;
  Wire wire_;
  size_t message_bytes_;        ///< one rank's partial sums, encoded; 0 without a wire format
  size_t rows_bytes_;           ///< room for these or for uncompressed ones
  size_t source_bytes_;         ///< with values
  OverlapWorkspace workspace_;  ///< shared: by rank; scratch: by rank, then messages by rank
  GrowingTensor decoded_;       ///< partial sums, in the uncompressed layout: rank by rank
  std::vector<int64_t> decoded_begin_;  ///< first row of each rank
  GrowingTensor products_;
};

}  // namespace tandem
