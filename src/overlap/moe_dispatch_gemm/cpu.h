// Rows to their experts on CPU ranks, each wave of them multiplied while the next travels.
//
// A run's shared memory has, for every rank, what that rank routes here and the rows themselves.
// Routing travels first and is awaited from all: with it every rank knows all slots. What a peer is
// told stands in this rank's scratch, whole rows side by side, so that each wave is one put.
//
// With a wire every row is a message (lossless: every wave), and rows that stay are used as
// decoded, too: which ranks share an expert does not show in what it is given.
#pragma once

#include <functional>
#include <vector>

#include "overlap/moe_plan.h"
#include "overlap/moe_rows.h"
#include "overlap/row_messages.h"
#include "overlap/workspace.h"

namespace tandem {

class MoeDispatchGemmCpu {
 public:
  /// `wire`: of encoded plans.
  MoeDispatchGemmCpu(Communicator& comm, const MoePlace& place, const Wire& wire);

  /// For slots of a local expert whose rows stand in `placed`.
  using Product = std::function<void(int expert, schedule::Range slots)>;

  /// Fills `rows` and `placed(rows)`, which is called once the number of slots is known, and calls
  /// `product` for all slots. Throws Mismatch on every rank where one's routing is wrong.
  void forward(const MoePlan& plan, const Tensor& x, const MoeRouting& routing, MoeRows& rows,
               const std::function<Tensor()>& placed, const Product& product);
  /// The same rows' gradients, over the way that `rows` describes.
  void backward(const MoePlan& plan, const Tensor& dout, const MoeRows& rows, const Tensor& placed,
                const Product& product);

 private:
  int routing_signal(int source) const { return source * (1 + schedule::kMoePieces); }
  int wave_signal(int source, int wave) const { return routing_signal(source) + 1 + wave; }
  size_t rows_offset(int source) const;
  void send_routing(const MoeRouting& routing, const MoeRows& rows, const std::string& fault);
  void receive_routing(MoeRows& rows, const std::string& fault);
  void send_rows(const MoePlan& plan, const Tensor& x, const MoeRows& rows);
  void compute(const MoePlan& plan, const Tensor& x, const MoeRows& rows, const Tensor& placed,
               const Product& product);
  void send_wave(const MoePlan& plan, const Tensor& x, const MoeRows& rows, int to, int wave);
  void place_own(const MoePlan& plan, const Tensor& x, const MoeRows& rows, const Tensor& placed);
  void place_wave(const MoePlan& plan, int wave, const MoeRows& rows, const Tensor& placed);
  void multiply(const MoeRows& rows, schedule::Range groups, const Product& product) const;

  /// Where the messages of a wave begin among those of all `rows` rows.
  size_t messages_before(const MoePlan& plan, int64_t rows, int wave) const;

  MoePlace place_;
  bool is_exact_;
  RowMessages messages_;
  size_t routing_bytes_, source_bytes_;  // of one source
  OverlapWorkspace workspace_;
  GrowingTensor packed_;  ///< rows before they are encoded, and decoded ones
};

}  // namespace tandem
