// Mixture-of-Experts layer with experts sharded over GPU ranks (COMET, arXiv 2502.19811). A forward
// pass is a few kernels, the same on all ranks, without any wait on the host:
//   notify     every rank learns the destinations of all rows
//   dispatch   sends each row once to each other rank with experts of it
//   permute    sorts by expert, then by source rank, local rows first
//   first      GEMM, gated: its tiles gather rows as they arrive; or, if experts get many rows, a
//              kernel sorts them first
//   second     GEMM
//   combine    sends the sum of each row's local results to the row's rank
//   reduce     sums over ranks, in rank order
//
// Serial: each kernel has all of the rank's SMs, one after another. Fused: some SMs are left to the
// communication kernels. Dispatch overlaps the first GEMM, whose tiles are ordered by the arrival
// of their rows; afterwards its SMs join the GEMM. Combine overlaps the second GEMM, which computes
// one group of columns after another. The bits are the same.
//
// Sorting, too, can overlap the first GEMM: its tiles wait for the permuted rows, local ones first.
// The sums of remote rows are then sent while the second GEMM computes the tiles with only local
// rows.
//
// Pushed: the copy engine sends all rows while they are sorted, and sums, which a kernel has added
// into this rank's memory, while local rows are multiplied: no SM is left to communication.
//
// In a wire format (wire.h), rows are encoded before dispatch, and decoded by the kernel that
// has sent: fused, tiles wait for a rank's decoded rows. Sums are encoded where they are sent, and
// decoded where they are added. Strategies have the same bits.
//
// A backward pass has candidates of its own. Gradients are notified, dispatched and permuted with
// the saved routing of the forward pass; gradients.h; and their sums are added after the gradients
// of the weights. Pushed: rows travel while they are sorted, which may overlap the GEMM through the
// second weight, and sums while the gradients of the weights are computed.
//
// Passes are lists of steps (schedule/moe_pass.h), made once per candidate; a lane is a stream.
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
#include "overlap/moe/on_ranks.h"
#include "overlap/moe/rows.h"
#include "schedule/moe_pass.h"
#include "tune/tuner.h"

namespace tandem::gpu {

/// Wire formats of rows and sums, for messages; "" if uncompressed.
std::string wires_of(const MoeOptions& options);

/// Saved activations of a forward pass in a batch.
struct MoeSavedActivations {
  MoeSavedActivations(const ExpertsShape& shape, const MoeSpace& space, uint64_t op);
  size_t bytes() const { return saved.x.bytes() + saved.gate_up.bytes(); }  ///< of the rows
  MoeSaved saved;
  DeviceMemory experts, weights;  ///< this rank's rows
  DeviceMemory call;              ///< u64: the pass's number, equal on all ranks
  int64_t rows = -1;              ///< rows of this rank; below 0: no pass has completed
  const uint64_t op;              ///< number of the matching operator
  uint64_t layer = 0;             ///< that it belongs to
};

/// State of one layer; layers share an operator.
struct MoeOfLayer {
  uint64_t number = 0;   ///< within a communicator; equal on all ranks
  DeviceMemory dropped;  ///< u64: dropped routings
};

/// Candidate for a forward pass of a layer.
using MoeForward = CandidateOf<const Tensor& /*x*/, const MoeRouting&, const Tensor& /*w_in*/,
                               const Tensor& /*w_out*/, const Tensor& /*out*/, MoeSavedActivations*,
                               const MoeOfLayer&>;

/// Candidate for a backward pass; the bits are the same.
struct MoeBackward {
  std::string name;
  Strategy form = Strategy::serial;
};

/// Runs all layers of a communicator that have the same shape and options (shared.h), one call
/// after another in stream order: between calls only their batches hold state.
class MoeOnGpus final {
 public:
  /// Collective. `sorts`: whether to add candidates that sort first; by default, if that is faster.
  /// The bits are the same.
  MoeOnGpus(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options,
            Choosing choosing = Choosing::fastest, std::optional<bool> sorts = {});

  /// Text that ranks must agree on for a layer. Collective; throws like the constructor.
  static std::string agreed_key(GpuCommunicator& comm, const MoeShape& shape,
                                const MoeOptions& options);

  void prepare(MoeRows& rows);
  void forward(const MoeOfLayer& layer, const Tensor& x, const MoeRouting& routing,
               const Tensor& w_in, const Tensor& w_out, const Tensor& out, MoeRows& rows);
  void backward(const MoeOfLayer& layer, const Tensor& dout, const Tensor& w_in,
                const Tensor& w_out, const MoeRows& rows, const Tensor& dx, const Tensor& dweights,
                const Tensor& dw_in, const Tensor& dw_out, WeightGradients gradients);
  Strategy strategy() const { return chosen().form; }
  int64_t dropped_routings(const MoeOfLayer& layer) const;
  /// For calls without a layer.
  int64_t dropped_routings() const { return dropped_routings(alone_); }

  /// Chosen candidates of the passes; nullopt: no backward pass can run.
  const Receipt& forward_receipt() const { return forward_receipt_; }
  const std::optional<Receipt>& backward_receipt() const { return backward_receipt_; }

  /// Uncompressed ones first, serial before fused; the same on all ranks.
  const std::vector<MoeForward>& candidates() const { return candidates_; }
  const MoeForward& chosen() const { return candidates_[chosen_]; }
  /// For a layer that trains; the same on all ranks.
  const std::vector<MoeBackward>& backward_candidates() const { return backward_candidates_; }
  /// Operands as for `forward`, already checked. A layer that trains fills `activations`. `layer`:
  /// null if only one is run.
  void run(size_t candidate, const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
           const Tensor& w_out, const Tensor& out, MoeSavedActivations* activations = nullptr,
           const MoeOfLayer* layer = nullptr);
  std::unique_ptr<MoeSavedActivations> make_saved() const;
  /// Operands as for `backward`, already checked.
  void run_backward(size_t candidate, const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                    const MoeSavedActivations& activations, const Tensor& dx,
                    const Tensor& dweights, const Tensor& dw_in, const Tensor& dw_out,
                    WeightGradients gradients = WeightGradients::add,
                    const MoeOfLayer* layer = nullptr);
  /// Runs only the two GEMMs, on the rows of the last call by candidate 0 (with encoded rows, as
  /// the last encoding call decoded them); with `gradients`, after a backward pass of it, also that
  /// pass's four.
  struct GradientsAlone {
    const MoeSavedActivations& activations;
    const Tensor &dw_in, &dw_out;
    WeightGradients mode = WeightGradients::add;
  };
  void multiply_alone(const Tensor& x, const Tensor& w_in, const Tensor& w_out,
                      const GradientsAlone* gradients = nullptr);

 private:
  /// Blocks of a candidate's kernels, and its wire formats.
  struct Blocks {
    int sending_blocks = 0;  ///< SMs that the GEMMs leave to communication; 0: serial
    int column_groups = 1;   ///< column groups of the combine
    /// Once all rows have arrived a kernel sorts them, so that the first GEMM need not gather them:
    /// dispatch does not overlap it.
    bool sorts = false;
    /// If above 0, with `sorts`: SMs, one sorting block each, that sort concurrently with the first
    /// GEMM. Dispatch overlaps it too, by blocks that then sort with the others, and combine
    /// overlaps the second GEMM's tiles of local rows, by `summing_blocks`.
    int sorting_blocks = 0, summing_blocks = 0;
    Wire dispatch = {};   ///< wire format of rows in a forward pass
    Wire combine = {};    ///< wire format of their sums
    bool pushes = false;  ///< the copy engine sends rows and sums; no sending or summing blocks
    bool is_serial() const { return sending_blocks == 0 && !pushes; }
    bool overlaps_sort() const { return sorting_blocks > 0; }
    bool overlaps_rows() const { return !is_serial() && !sorts && !pushes; }
    /// Uncompressed rows only: messages are decoded before rows are sorted.
    bool sends_while_sorting() const {
      return !is_serial() && !pushes && overlaps_sort() && dispatch.is_none();
    }
    int blocks_while_sorting() const {
      return sorting_blocks + (sends_while_sorting() ? sending_blocks : 0);
    }
    bool encodes() const { return !dispatch.is_none() || !combine.is_none(); }
    bool operator==(const Blocks&) const = default;
    std::string describe() const;
  };
  /// Tables of the two GEMMs, by candidate.
  struct Tables {
    int in = 0;
    std::vector<int> out;
    std::vector<schedule::Range> columns;  ///< ranges of the second GEMM's column groups
  };

  struct BackwardBlocks {
    bool pushes = false;     ///< as in Blocks; otherwise serial
    int sorting_blocks = 0;  ///< if above 0: SMs that sort concurrently with the first GEMM
    bool overlaps_sort() const { return sorting_blocks > 0; }
    bool operator==(const BackwardBlocks&) const = default;
    std::string describe() const;
  };
  struct BackwardForm {
    BackwardBlocks blocks;
    int d_act_table = 0;
    schedule::MoePass pass = {};
  };

  /// Number of SMs / divisor, at least 1: even if blocks work in pairs, of which one would be left
  /// without a partner (ConcurrentBlocks).
  int divided_sms(int divisor) const;
  /// Adds serial and fused candidates with one wire format per direction.
  void add_candidates(const MoeOptions& options, const Wire& dispatch, const Wire& combine);
  void add_candidate(const Blocks& candidate);
  void add_choice(const Blocks& blocks);
  double us_to_send_row(int blocks) const;
  schedule::Joining joining_sorters(const Blocks& candidate) const;
  /// `blocks`: number of blocks that sort and do not send.
  schedule::Joining joining_sorters(int blocks) const;
  void add_backward_candidates(const MoeOptions& options);
  void add_backward_candidate(const BackwardBlocks& blocks);
  /// Whether the copy engine may send: on a shared GPU a kernel could keep its copies waiting.
  bool can_push(const MoeOptions& options) const {
    return options.strategy != Strategy::serial && comm_.size() > 1 && comm_.has_whole_gpu();
  }
  /// Whether a candidate pushes.
  bool may_push() const;
  schedule::Joining joining_senders(const Blocks& candidate) const;
  /// Allocates this rank's non-symmetric memory, and adds the candidates.
  void allocate(const MoeOptions& options);
  GroupedGemm& in_of(const Blocks& candidate) const { return candidate.sorts ? *in_sorted_ : *in_; }
  void choose(const MoeOptions& options);
  /// Records choices in the receipts.
  void record(const Choice& forward_choice, const Choice& backward_choice);
  /// Key of a choice in the cache.
  std::string tuning_key(const MoeOptions& options, const char* pass) const;
  void check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                      const Tensor& w_out, const Tensor& out) const;
  void check_weight_gradients(const Tensor& dw_in, const Tensor& dw_out,
                              WeightGradients gradients) const;
  void clear(const Tensor& dw_in, const Tensor& dw_out) const;
  int64_t in_rows() const { return coords_.experts.count * 2 * coords_.ffn; }
  int64_t out_rows() const { return coords_.experts.count * coords_.shape.hidden; }
  /// Saved activations of a training layer in a batch, allocated if it has none.
  MoeSavedActivations* saved_in(MoeRows& rows) const;
  bool trains() const { return gradients_ != nullptr; }
  MoeCall call_of(const MoeRouting& routing, const MoeOfLayer& layer) const;
  MoePermutation permutation() const;
  SortedRows sorted() const;
  GroupedArrivals arrivals() const;
  /// Rows as read by the experts' kernels: remote rows, local rows, and the arrival flags of the
  /// remote ones.
  struct Rows {
    const void *others, *local;
    GroupedArrivals arrivals;
  };
  Rows uncompressed_rows(const Tensor& local) const;
  Rows rows_of(const Blocks& candidate, const Tensor& x) const;
  std::byte* local_decoded() const;
  /// Gathers `rows` to sorted positions at `to`.
  MoeGather gathering(const Rows& rows, void* to) const;
  /// Operands of a pass.
  struct PassArgs {
    MoeCall call;
    size_t candidate = 0;
    Tensor rows;  ///< x, or dout
    Tensor w_in = {}, w_out = {};
    Tensor result = {};  ///< out, or dx
    const MoeSavedActivations* activations = nullptr;
    const BackwardForm* backward = nullptr;
    Tensor dw_in = {}, dw_out = {};
    WeightGradients gradients = WeightGradients::add;
  };
  schedule::MoePassForm form_of(const Blocks& candidate, size_t column_groups) const;
  void enqueue_pass(const schedule::MoePass& pass, PassArgs& args);
  // Launches of steps; layer_pass.cc.
  void launch(const schedule::PassStep& step, PassArgs& args, cudaStream_t stream);
  void launch_rows(PassArgs& args, cudaStream_t stream);
  void launch_permutation(const PassArgs& args, cudaStream_t stream);
  void launch_gathering(const PassArgs& args, bool sends, cudaStream_t stream);
  void launch_first(const PassArgs& args, cudaStream_t stream);
  void launch_second(const schedule::PassStep& step, const PassArgs& args, cudaStream_t stream);
  void launch_sums(const schedule::PassStep& step, const PassArgs& args, cudaStream_t stream);
  void launch_sum(const PassArgs& args, cudaStream_t stream);
  void push_rows(const PassArgs& args, cudaStream_t stream);
  void push_sums(cudaStream_t stream);
  void launch_gradient(const schedule::PassStep& step, const PassArgs& args, cudaStream_t stream);
  /// Whether GEMM blocks of a forward pass join later: they must not take the SMs of a send kernel
  /// that has yet to start.
  bool joins(const Blocks& candidate, const Tables& tables) const;
  /// Blocks of a candidate's kernels that send rows.
  int row_blocks(const Blocks& candidate) const;
  void* sorted_x(const PassArgs& args) const;
  GroupedArgs first_product(const Rows& rows, const Tensor& w_in) const;
  GroupedArgs second_product(const Tensor& w_out) const;
  /// Blocks of a send kernel that runs without a concurrent GEMM.
  int sending_blocks() const;
  void enqueue(size_t candidate, const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
               const Tensor& w_out, const Tensor& out, MoeSavedActivations* activations,
               const MoeOfLayer& layer);
  void enqueue_backward(size_t candidate, const Tensor& dout, const Tensor& w_in,
                        const Tensor& w_out, const MoeSavedActivations& activations,
                        const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                        const Tensor& dw_out, WeightGradients gradients, const MoeOfLayer& layer);
  Event& event_of(schedule::PassEvent event);
  MoeState* state() const { return reinterpret_cast<MoeState*>(state_.data()); }

  GpuCommunicator& comm_;
  const uint64_t number_;  ///< unique in this process
  MoeOfLayer alone_;
  MoeRankCoords coords_;
  MoeSpace space_;
  ExpertsShape experts_;
  bool sorts_;
  std::vector<MoeForward> candidates_;
  std::vector<Blocks> blocks_;  ///< by candidate
  std::vector<Tables> tables_;
  std::vector<schedule::MoePass> passes_;  ///< forward, by candidate
  std::vector<MoeBackward> backward_candidates_;
  std::vector<BackwardForm> backward_;  ///< by candidate
  size_t chosen_ = 0, chosen_backward_ = 0;
  Receipt forward_receipt_;
  std::optional<Receipt> backward_receipt_;
  // All null if no rank brings rows.
  std::shared_ptr<GpuBuffer> buffer_;
  std::unique_ptr<GroupedGemm> in_, in_sorted_, out_;
  DeviceMemory inner_, results_;  ///< [padded rows, ffn shard], [padded rows, hidden]
  DeviceMemory counts_, source_, positions_, token_in_rank_, state_, group_rows_;
  DeviceMemory ready_;        ///< permuted rows of each row tile
  DeviceMemory messages_;     ///< this rank's rows
  DeviceMemory decoded_;      ///< [size, tokens, hidden], local rows last
  DeviceMemory staged_sums_;  ///< [size - 1, tokens, hidden], of pushing candidates
  // For a layer that trains.
  std::unique_ptr<ExpertGradients> gradients_;
  DeviceMemory routing_idx_, d_gate_weight_;
  cudaStream_t side_ = nullptr;  ///< shared by all layers of this communicator
  Event notified_, rows_sent_, sums_sent_;
  std::array<Event, kMaxColumnGroups> computed_;
};

}  // namespace tandem::gpu
