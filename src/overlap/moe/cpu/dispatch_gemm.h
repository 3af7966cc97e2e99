// Rows to their experts on CPU ranks, each wave of them multiplied while the next travels.
//
// A run's shared memory has, for every rank, what that rank routes here and the rows themselves.
// Routing travels first and is awaited from all: with it every rank knows all slots. A rank whose
// call cannot be (operands, routing, batch) says so in its place, and all ranks throw it before
// anything of the caller's is written. What a peer is told stands in this rank's scratch, whole
// rows side by side, so that each wave is one put.
//
// With a wire every row is a message (lossless: every wave), and rows that stay are used as
// decoded, too: which ranks share an expert does not show in what it is given.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "overlap/moe/plan.h"
#include "overlap/moe/rows.h"

namespace tandem {

class MoeDispatchGemmCpu {
 public:
  /// `wire`: of encoded plans.
  MoeDispatchGemmCpu(Communicator& comm, const MoePlace& place, const Wire& wire);

  /// For slots of a local expert whose rows stand in `placed`.
  using Product = std::function<void(int expert, schedule::Range slots)>;

  /// `plans`, by level, are of one wire and the same on all ranks. Rows leave by this rank's own
  /// level, before it knows what the others route, and are multiplied by that of all ranks' rows.
  /// Fills `rows` and `placed(rows)`, which is called once the number of slots is known, and calls
  /// `product` for all slots. Throws Mismatch on every rank where one's routing is wrong.
  void forward(std::span<const MoePlan> plans, const Tensor& x, const MoeRouting& routing,
               MoeRows& rows, const std::function<Tensor()>& placed, const Product& product);
  /// The same rows' gradients, over the way that `rows` describes. Throws Mismatch on every rank
  /// where one goes forward, or back with another call's batch.
  void backward(const MoePlan& plan, const Tensor& dout, const MoeRows& rows, const Tensor& placed,
                const Product& product);

  /// The part in a call of a rank that cannot make it: throws Mismatch on this and, in `forward` or
  /// `backward`, on every other, "moe: rank 1: " and what the first such rank says.
  void refuse(std::string_view fault);
  /// Why `rows` cannot go back; empty: they can.
  std::string fault_of(const MoeRows& rows) const;

 private:
  /// Before what a rank routes, or what is wrong.
  struct Header {
    int64_t rows = 0;
    uint64_t batch = 0;  ///< the call whose rows' gradients follow; 0: a forward pass
    size_t fault_bytes = 0;
    int64_t waves = 1;  ///< that its rows come in
  };
  int routing_signal(int source) const { return source * (1 + schedule::kMoePieces); }
  int wave_signal(int source, int wave) const { return routing_signal(source) + 1 + wave; }
  size_t rows_offset(int source) const;
  std::byte* told_by(int source) const;
  Header header_of(int source) const;
  void tell(int to, const Header& header, std::span<const std::byte> content);
  void tell_all(const Header& header, std::span<const std::byte> content);
  void await_headers();
  void send_routing(const MoePlan& plan, const MoeRouting& routing, const MoeRows& rows);
  void list_arrived(MoeRows& rows);
  /// How uneven rows with `loads` are.
  int level_of(std::span<const int64_t> loads) const;
  void send_rows(const MoePlan& plan, const Tensor& x, const MoeRows& rows);
  void compute_own(const MoePlan& plan, const Tensor& x, const MoeRows& rows, const Tensor& placed,
                   const Product& product);
  void compute_remote(const MoePlan& plan, const MoeRows& rows, const Tensor& placed,
                      const Product& product);
  void send_wave(const MoePlan& plan, const Tensor& x, const MoeRows& rows, int to, int wave);
  void place_own(const MoePlan& plan, const Tensor& x, const MoeRows& rows, const Tensor& placed);
  void place_wave(const MoePlan& plan, int source, int wave, const MoeRows& rows,
                  const Tensor& placed);
  void multiply(const MoeRows& rows, schedule::Range groups, const Product& product) const;

  /// Where the messages of a wave begin among those of all `rows` rows, that come in `waves`.
  size_t messages_before(int waves, int64_t rows, int wave) const;

  MoePlace place_;
  bool is_exact_;
  RowMessages messages_;
  uint64_t layer_;
  size_t routing_bytes_, source_bytes_;  // of one source
  OverlapWorkspace workspace_;
  std::vector<std::byte> entries_;  ///< of what one rank is told
  GrowingTensor packed_;            ///< rows before they are encoded, and decoded ones
};

}  // namespace tandem
