// A Mixture-of-Experts layer whose experts are spread over GPU ranks (COMET, arXiv 2502.19811). A
// forward pass is a few kernels, the same on all ranks, and nothing that the host waits for:
//
//   announce   every rank learns where all rows go
//   send rows  once to each other rank with experts of a row
//   place      by expert, then by the rank that a row is of, own ones first
//   first      product, gated: its tiles gather rows, each once those are there; or, where experts
//              get many, a kernel sorts them first
//   second     product
//   send sums  of each row's results here, to the rank that it is of
//   sum        over ranks, in their order
//
// Serial, each has all of the rank's SMs, one after the other. Fused, some SMs are left to what
// sends: rows leave beside the first product, whose tiles come in the order in which rows arrive;
// when they have left, these SMs join the product. Sums leave beside the second, which computes one
// group of columns after the other. The bits are the same.
//
// Where rows are sorted, that can be done beside the first product, too: its tiles wait for their
// rows to be in place, own ones first. Sums of others' rows then leave beside the second product
// of the tiles that have own rows alone.
//
// In a wire format (wire.h) rows are encoded before they are sent, and decoded by what has sent
// them: fused, tiles wait for the decoded rows of a rank. Sums are encoded where they are sent, and
// decoded where they are added. Strategies have the same bits.
//
// A backward pass, serial: gradients are announced, sent and placed as the rows were, which the
// forward pass has kept; gradients.h; and their sums are sent back while the gradients of the
// weights are computed.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda/handles.h"
#include "gemm/cuda/grouped.h"
#include "overlap/contract/operator.h"
#include "overlap/moe/cuda/exchange.h"
#include "overlap/moe/cuda/expert_rows.h"
#include "overlap/moe/cuda/gradients.h"
#include "overlap/moe/cuda/permute.h"
#include "overlap/moe/rows.h"

namespace tandem::gpu {

/// How a layer can be run.
struct MoeWay {
  int sending_blocks = 0;  ///< SMs that the products leave to what sends; 0: serial
  int parts = 1;           ///< groups of columns in which sums leave
  /// Once all rows are there a kernel sorts them for the first product, which then need not gather
  /// them: no rows leave beside it.
  bool sorts = false;
  /// Above 0, where it sorts: SMs of which each has a block that sorts beside the first product.
  /// Rows leave beside it, too, by blocks that then sort with the others, and sums beside the
  /// second one's tiles of own rows, by `summing_blocks`.
  int sorting_blocks = 0, summing_blocks = 0;
  Wire dispatch = {};  ///< what rows travel as in a forward pass
  Wire combine = {};   ///< and their sums
  bool is_serial() const { return sending_blocks == 0; }
  bool sorts_beside() const { return sorting_blocks > 0; }
  bool sends_rows_beside() const { return !is_serial() && !sorts; }
  /// Plain rows alone: messages are decoded before rows are sorted.
  bool sends_while_sorting() const { return !is_serial() && sorts_beside() && dispatch.is_none(); }
  int blocks_while_sorting() const {
    return sorting_blocks + (sends_while_sorting() ? sending_blocks : 0);
  }
  bool encodes() const { return !dispatch.is_none() || !combine.is_none(); }
  bool operator==(const MoeWay&) const = default;
  std::string describe() const;
};

/// What rows and sums travel as, for messages; "" where that is plain.
std::string wires_of(const MoeOptions& options);

/// What a forward pass leaves in a batch.
struct MoeKept {
  MoeKept(const ExpertsShape& shape, const MoeSpace& space, uint64_t op);
  MoeSaved saved;
  DeviceMemory experts, weights;  ///< of this rank's rows
  DeviceMemory call;              ///< u64: the pass's number, the same on all ranks
  int64_t rows = -1;              ///< that this rank brought; below 0: no pass went through
  const uint64_t op;              ///< number of the operator that it fits
  uint64_t layer = 0;             ///< whose it is
};

/// A layer's own state, while others run on the same operator.
struct MoeOfLayer {
  uint64_t number = 0;   ///< among those of a communicator: the same on all ranks
  DeviceMemory refused;  ///< u64: choices that were none
};

/// Runs all layers of a communicator that have the same shape and options (shared.h), one call
/// after the other in the order of its stream: between calls nothing is kept here but what their
/// batches have.
class MoeOnGpus final {
 public:
  /// Collective. `sorts`: whether there are ways that sort first, if not where that is faster. The
  /// bits are the same.
  MoeOnGpus(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options,
            Choosing choosing = Choosing::fastest, std::optional<bool> sorts = {});

  /// What ranks agree on of a layer, as text. Collective; throws as the constructor.
  static std::string agreed_key(GpuCommunicator& comm, const MoeShape& shape,
                                const MoeOptions& options);

  void forward(const MoeOfLayer& layer, const Tensor& x, const MoeRouting& routing,
               const Tensor& w_in, const Tensor& w_out, const Tensor& out, MoeRows& rows);
  void backward(const MoeOfLayer& layer, const Tensor& dout, const Tensor& w_in,
                const Tensor& w_out, const MoeRows& rows, const Tensor& dx, const Tensor& dweights,
                const Tensor& dw_in, const Tensor& dw_out);
  Strategy strategy() const {
    return chosen().is_serial() ? Strategy::serial : Strategy::overlapped;
  }
  int64_t refused_choices(const MoeOfLayer& layer) const;
  /// For calls without a layer.
  int64_t refused_choices() const { return refused_choices(alone_); }

  /// Plain ones first, serial before fused; the same on all ranks.
  const std::vector<MoeWay>& ways() const { return ways_; }
  const MoeWay& chosen() const { return ways_[chosen_]; }
  /// Operands as of `forward`, and right. A layer that trains fills `kept`. `layer`: none where
  /// only one is run.
  void run(size_t way, const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
           const Tensor& w_out, const Tensor& out, MoeKept* kept = nullptr,
           const MoeOfLayer* layer = nullptr);
  std::unique_ptr<MoeKept> make_kept() const;
  /// Operands as of `backward`, and right.
  void run_backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                    const MoeKept& kept, const Tensor& dx, const Tensor& dweights,
                    const Tensor& dw_in, const Tensor& dw_out, const MoeOfLayer* layer = nullptr);
  /// The two products alone, of the rows of the last call by way 0 (where rows may be encoded, as
  /// the last call that did has decoded them); with `gradients`, behind a backward pass of it, the
  /// four of that one, too.
  struct GradientsAlone {
    const MoeKept& kept;
    const Tensor &dw_in, &dw_out;
  };
  void multiply_alone(const Tensor& x, const Tensor& w_in, const Tensor& w_out,
                      const GradientsAlone* gradients = nullptr);

 private:
  /// Tables of the two products, by way.
  struct Tables {
    int in = 0;
    std::vector<int> out;
    std::vector<schedule::Range> columns;  ///< of the second product's parts
  };

  /// Serial and fused, of one wire format for each direction.
  void add_ways(const MoeOptions& options, const Wire& dispatch, const Wire& combine);
  void add_way(const MoeWay& way);
  double us_to_send_row(int blocks) const;
  schedule::Joining joining_sorters(const MoeWay& way) const;
  schedule::Joining joining_senders(const MoeWay& way) const;
  /// This rank's memory, but for what is symmetric, and its ways.
  void allocate(const MoeOptions& options);
  GroupedGemm& in_of(const MoeWay& way) const { return way.sorts ? *in_sorted_ : *in_; }
  void choose(const MoeOptions& options);
  void check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                      const Tensor& w_out, const Tensor& out) const;
  /// The memory of a layer that trains in a batch, made where it has none.
  MoeKept* kept_in(MoeRows& rows) const;
  bool trains() const { return gradients_ != nullptr; }
  MoeCall call_of(const MoeRouting& routing, const MoeOfLayer& layer) const;
  MoePlacing placing() const;
  SortedRows sorted() const;
  GroupedGate arrivals() const;
  /// Rows as the experts' kernels find them: those of others, own ones, and until when the former
  /// are there.
  struct Rows {
    const void *others, *own;
    GroupedGate gate;
  };
  Rows plain_rows(const Tensor& own) const;
  Rows rows_of(const MoeWay& way, const Tensor& x) const;
  std::byte* own_decoded() const;
  /// To where experts' rows lie sorted.
  MoeGather gathering(const Rows& rows, void* to) const;
  /// `rows` leave, are put into place as the product's x and multiplied, all beside each other.
  void sort_beside(size_t way, const MoeCall& call, const Tensor& x, const Rows& rows,
                   GroupedJob in);
  /// The second product, part by part of its columns, and behind each the sums of others' rows, in
  /// the stream `sender`.
  void multiply_out(size_t way, const MoeCall& call, const Tensor& w_out, cudaStream_t sender);
  /// The second product and the sums of others' rows: of the tiles that have such rows, then,
  /// beside the sums, of the others.
  void multiply_out_beside(size_t way, const MoeCall& call, const Tensor& w_out);
  GroupedJob first_product(const Rows& rows, const Tensor& w_in) const;
  GroupedJob second_product(const Tensor& w_out) const;
  /// Blocks of what sends when nothing runs beside it.
  int sending_blocks() const;
  void enqueue(size_t way, const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
               const Tensor& w_out, const Tensor& out, MoeKept* kept, const MoeOfLayer& layer);
  void enqueue_backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                        const MoeKept& kept, const Tensor& dx, const Tensor& dweights,
                        const Tensor& dw_in, const Tensor& dw_out, const MoeOfLayer& layer);
  MoeState* state() const { return reinterpret_cast<MoeState*>(state_.data()); }

  GpuCommunicator& comm_;
  const uint64_t number_;  ///< in this process
  MoeOfLayer alone_;
  MoePlace place_;
  MoeSpace space_;
  ExpertsShape experts_;
  bool sorts_;
  std::vector<MoeWay> ways_;
  std::vector<Tables> tables_;
  size_t chosen_ = 0;
  // None of what follows where no rank brings rows.
  std::shared_ptr<GpuBuffer> buffer_;
  std::unique_ptr<GroupedGemm> in_, in_sorted_, out_;
  DeviceMemory inner_, results_;  ///< [padded rows, ffn part], [padded rows, hidden]
  DeviceMemory counts_, source_, places_, goes_, state_, group_rows_;
  DeviceMemory ready_;     ///< rows of each row tile that are in place
  DeviceMemory messages_;  ///< of this rank's rows
  DeviceMemory decoded_;   ///< [size, tokens, hidden], own rows last
  // Of a layer that trains.
  std::unique_ptr<ExpertGradients> gradients_;
  DeviceMemory choice_, dots_;
  cudaStream_t side_ = nullptr;  ///< of all layers of this communicator
  Event begun_, ended_;
  std::array<Event, kMostMoeParts> computed_;
};

}  // namespace tandem::gpu
