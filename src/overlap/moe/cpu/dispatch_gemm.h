// Dispatch of rows to their experts on CPU ranks; each wave is multiplied while the next is in
// flight.
//
// A run's shared memory has, for every rank, that rank's routing and its rows. Routing is sent
// first and awaited from all: with it every rank knows all slots. A rank whose call is invalid
// (operands, routing, batch) sends the fault instead, and all ranks throw it before anything of the
// caller's is written. Messages to a peer are staged in this rank's scratch, whole rows
// contiguously, so that each wave is one put.
//
// With a wire format every row is a message (lossless: every wave), and rows that stay local are
// used as decoded, too: an expert's input does not depend on which ranks share it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/rows/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "overlap/moe/rows.h"

namespace tandem {

class MoeDispatchGemmCpu {
 public:
  /// `wire`: of encoded plans.
  MoeDispatchGemmCpu(Communicator& comm, const MoeRankCoords& coords, const Wire& wire);

  // Steps of a pass (schedule/moe_pass.h), in this order. The chunks of a plan are those of remote
  // rows.

  /// Starts a forward pass: sends this rank's routing, and sets the level of `rows` to that of this
  /// rank's rows. `plans`, by level, have one wire format and are the same on all ranks. If the
  /// routing is invalid, throws Mismatch on every rank.
  void notify(std::span<const OverlapOptions> plans, const MoeRouting& routing, MoeRows& rows);
  /// Starts another dispatch with the routing in `rows`.
  void notify_again(const OverlapOptions& plan, const MoeRows& rows);
  /// Sends the rows that have experts on other ranks. A forward pass knows only its own level then.
  void send_rows(const OverlapOptions& plan, const Tensor& x, const MoeRows& rows);
  /// Forward: awaits all ranks' routing. `rows` has positions and the level of all ranks' rows
  /// then.
  void permute(MoeRows& rows);
  /// Otherwise: awaits all ranks. Throws Mismatch on every rank if one runs forward, or is in
  /// another call's pass.
  void await_ranks();
  /// Destinations of arrived rows.
  struct Arrived {
    Tensor sorted;         ///< [slots, hidden]
    Tensor distinct = {};  ///< [received rows, hidden], or no dimensions: not wanted
  };
  void gather_local(const OverlapOptions& plan, const Tensor& x, const MoeRows& rows,
                    const Arrived& to);
  /// Awaits the chunk of every other rank.
  void gather_chunk(const OverlapOptions& plan, int chunk, const MoeRows& rows, const Arrived& to);
  /// Marks `rows` as filled by the forward pass that has just ended.
  void complete(MoeRows& rows) const { rows.filled = {layer_, workspace_.epoch()}; }

  /// Takes part in a call that this rank cannot make: throws Mismatch on this and, in their next
  /// step that waits, on every other rank, "moe: rank 1: " and the fault of the first such rank.
  void refuse(std::string_view fault);
  /// Reason why `rows` cannot run backward; empty if they can.
  std::string fault_of(const MoeRows& rows) const;

 private:
  /// Precedes a rank's routing, or its fault.
  struct Header {
    int64_t rows = 0;
    uint64_t batch = 0;  ///< the call whose rows' gradients follow; 0: a forward pass
    size_t fault_bytes = 0;
    int64_t waves = 1;  ///< waves of its rows
  };
  int routing_signal(int source) const { return source * (1 + schedule::kMaxMoeWaves); }
  int wave_signal(int source, int wave) const { return routing_signal(source) + 1 + wave; }
  size_t rows_offset(int source) const;
  std::byte* message_of(int source) const;
  Header header_of(int source) const;
  void tell(int to, const Header& header, std::span<const std::byte> content);
  void tell_all(const Header& header, std::span<const std::byte> content);
  void await_headers();
  void send_routing(const OverlapOptions& plan, const MoeRouting& routing, const MoeRows& rows);
  void list_arrived(MoeRows& rows);
  /// Imbalance level of rows with `loads`.
  int level_of(std::span<const int64_t> loads) const;
  void send_wave(const OverlapOptions& plan, const Tensor& x, const MoeRows& rows, int to,
                 int wave);
  void gather_wave(const OverlapOptions& plan, int source, int wave, const MoeRows& rows,
                   const Arrived& to);
  /// Copies received row `row` of `source` to its positions.
  void copy_row(const std::byte* from, int source, int64_t row, const MoeRows& rows,
                const Arrived& to) const;

  /// Offset of the messages of a wave among those of all `rows` rows, sent in `waves`.
  size_t messages_before(int waves, int64_t rows, int wave) const;

  MoeRankCoords coords_;
  bool is_exact_;
  RowMessages messages_;
  uint64_t layer_;
  size_t routing_bytes_, source_bytes_;  // per source
  OverlapWorkspace workspace_;
  std::vector<std::byte> entries_;  ///< message to one rank
  GrowingTensor packed_;            ///< rows before they are encoded, and decoded ones
};

}  // namespace tandem
