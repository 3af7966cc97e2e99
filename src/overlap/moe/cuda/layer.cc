#include "overlap/moe/cuda/layer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "codec/cuda/encode.h"
#include "core/cuda/check.h"
#include "core/cuda/graph.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/cuda/wire.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

using namespace schedule;

/// Throws for what GPU ranks do not support. Returns the layer as text.
std::string checked(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options) {
  const MoeRankCoords coords(comm, shape);
  const auto refuse = [](const char* what, int64_t value, const std::string& expected) {
    throw InvalidArgument(fmt::format("moe: {} {}: expected {} on GPUs", what, value, expected));
  };
  if (shape.hidden % 8 != 0) refuse("hidden", shape.hidden, "a multiple of 8");
  if (shape.ffn % (8 * shape.tp) != 0) {
    refuse("ffn", shape.ffn, fmt::format("a multiple of 8 x tp = {}", 8 * shape.tp));
  }
  if (coords.experts.count > kMaxExperts) {
    refuse("experts of a rank", coords.experts.count, fmt::format("at most {}", kMaxExperts));
  }
  if (shape.tokens * comm.size() >= kLocalRows) {
    refuse("tokens of all ranks", shape.tokens * comm.size(), "less than 2^30");
  }
  if (options.save != MoeSave::sorted) {
    throw InvalidArgument(
        fmt::format("moe: save {}: expected sorted on GPUs", name_of(options.save)));
  }
  if (options.chunks != 0) refuse("chunks", options.chunks, "0, as the tuner chooses,");
  if (!options.dispatch.is_none()) {
    require_encodable_on_gpu("moe dispatch", options.dispatch, shape.dtype);
  }
  if (!options.combine.is_none()) {
    require_encodable_on_gpu("moe combine", options.combine, shape.dtype);
  }
  if (!comm.one_node() || comm.size() > kMaxGpus) {
    throw Unsupported("moe: expected GPUs that reach each other's memory");
  }
  if (!has_hopper_kernels(comm)) {
    throw Unsupported("moe: expected a GPU of compute capability 9.0, with its own kernels");
  }
  return fmt::format("{} {}{}{}{}", coords.describe(), name_of(options.strategy), wires_of(options),
                     options.backward ? " for backward" : "", strictness(options.strict));
}

const MoeShape& agreed(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options) {
  comm.require_same("moe", checked(comm, shape, options));
  return shape;
}

uint64_t next_operator() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

MoeSpace space_of(const GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options) {
  const auto message = [&](const Wire& wire) {
    return comm.size() == 1 || wire.is_none() ? 0 : wire.bytes(shape.hidden, shape.dtype);
  };
  return {.tokens = shape.tokens,
          .hidden = shape.hidden,
          .top_k = shape.top_k,
          .world = comm.size(),
          .trains = options.backward,
          .row_message = message(options.dispatch),
          .sum_message = message(options.combine),
          .allow_uncompressed = options.allow_uncompressed};
}

/// Max rows that a rank's experts may receive.
int64_t max_rows(const MoeRankCoords& coords) {
  const int64_t chosen = std::min<int64_t>(coords.shape.top_k, coords.experts.count);
  return coords.world * coords.shape.tokens * chosen;
}

bool usually_sorts(const MoeRankCoords& coords) {
  return sorting_is_faster(coords.usual_rows(), coords.experts.count, coords.ffn);
}

/// `sorts`: as requested; if set, it also decides whether blocks work in pairs.
ExpertsShape experts_of(const MoeRankCoords& coords, std::optional<bool> sorts) {
  const bool pairs = pairs_are_faster(coords.usual_rows(), int(coords.experts.count));
  return {.dtype = coords.shape.dtype,
          .experts = int(coords.experts.count),
          .rows = max_rows(coords),
          .hidden = coords.shape.hidden,
          .ffn = coords.ffn,
          .fixed_order = true,
          .paired = sorts.value_or(pairs)};
}

struct SideStream {
  CommonStream stream{Common::side};
};

}  // namespace

MoeOnGpus::MoeOnGpus(GpuCommunicator& comm, const MoeShape& shape, const MoeOptions& options,
                     Choosing choosing, std::optional<bool> sorts)
    : comm_(comm),
      number_(next_operator()),
      coords_(comm, agreed(comm, shape, options)),
      space_(space_of(comm, shape, options)),
      experts_(experts_of(coords_, sorts)),
      sorts_(sorts.value_or(usually_sorts(coords_))),
      forward_receipt_(make_moe_receipt("moe", coords_, options)) {
  if (options.backward && shape.tokens > 0) {
    backward_receipt_ = make_moe_receipt("moe backward", coords_, options);
  }
  add_choice({});
  if (shape.tokens == 0) {
    record({}, {});
    return;
  }
  buffer_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(space_.bytes(), MoeSpace::kSignals));
  comm.agree_on("moe: memory of a layer", [&] { allocate(options); });
  if (choosing == Choosing::fastest) choose(options);
}

void MoeOnGpus::allocate(const MoeOptions& options) {
  const MoeShape& shape = coords_.shape;
  const bool trains = options.backward;
  alone_.dropped = DeviceMemory(sizeof(uint64_t));
  const int64_t padded = experts_.padded_rows();
  in_ = make_grouped_gemm(trains ? experts_.in_ungated(true) : experts_.in(true));
  if (sorts_) {
    in_sorted_ = make_grouped_gemm(trains ? experts_.in_ungated(false) : experts_.in(false));
  }
  out_ = make_grouped_gemm(experts_.out());
  inner_ = values(padded, coords_.ffn);
  results_ = values(padded, shape.hidden);
  counts_ = ints(coords_.world * coords_.experts.count);
  source_ = ints(padded);
  positions_ = ints(coords_.world * space_.routings());
  token_in_rank_ = DeviceMemory(size_t(shape.tokens));
  state_ = DeviceMemory(sizeof(MoeState));
  group_rows_ = DeviceMemory(size_t(experts_.experts + 1) * sizeof(GroupRows));
  if (sorts_ || trains) ready_ = ints(experts_.out().row_tiles());
  if (trains) {
    gradients_ = std::make_unique<ExpertGradients>(experts_);
    routing_idx_ = ints(padded);
    d_gate_weight_ = ints(coords_.world * space_.routings());
  }
  if (space_.row_message > 0) {
    messages_ = DeviceMemory(size_t(shape.tokens) * space_.row_message);
    decoded_ = values(coords_.world * shape.tokens, shape.hidden);
  }
  side_ = comm_.attached<SideStream>([] { return new SideStream; }).stream.get();
  candidates_.clear();
  blocks_.clear();
  const bool encodes = space_.row_message > 0 || space_.sum_message > 0;
  if (!encodes || options.allow_uncompressed) add_candidates(options, {}, {});
  if (encodes) add_candidates(options, options.dispatch, options.combine);
  if (trains) add_backward_candidates(options);
  if (may_push()) staged_sums_ = values((coords_.world - 1) * shape.tokens, shape.hidden);
}

std::string MoeOnGpus::agreed_key(GpuCommunicator& comm, const MoeShape& shape,
                                  const MoeOptions& options) {
  std::string key = checked(comm, shape, options);
  comm.require_same("moe", key);
  return key;
}

void MoeOnGpus::check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                               const Tensor& w_out, const Tensor& out) const {
  const MoeShape& s = coords_.shape;
  const int64_t num_rows = x.dims() == 2 ? std::min(x.dim(0), s.tokens) : s.tokens;
  const auto check = [&](const char* name, const Tensor& tensor, DType dtype, int64_t rows,
                         int64_t columns) {
    check_matrix(comm_, "moe", name, tensor, dtype, rows, columns);
  };
  check("x", x, s.dtype, num_rows, s.hidden);
  check("out", out, out.dtype() == DType::f32 ? DType::f32 : s.dtype, num_rows, s.hidden);
  check("routing.experts", routing.experts, DType::i32, num_rows, s.top_k);
  check("routing.weights", routing.weights, DType::f32, num_rows, s.top_k);
  check("w_in", w_in, s.dtype, coords_.experts.count * 2 * coords_.ffn, s.hidden);
  check("w_out", w_out, s.dtype, coords_.experts.count * s.hidden, coords_.ffn);
  require_moe_apart(x, routing, w_in, w_out, out);
}

void MoeOnGpus::prepare(MoeRows& rows) {
  rows.filled = {};
  if (coords_.shape.tokens == 0 || !trains()) return;
  comm_.agree_on("moe: memory of a batch", [&] { saved_in(rows)->rows = -1; });
}

void MoeOnGpus::forward(const MoeOfLayer& layer, const Tensor& x, const MoeRouting& routing,
                        const Tensor& w_in, const Tensor& w_out, const Tensor& out, MoeRows& rows) {
  rows.filled = {};
  if (auto* before = static_cast<MoeSavedActivations*>(rows.on_gpu.get())) before->rows = -1;
  check_operands(x, routing, w_in, w_out, out);
  comm_.check_device();
  if (coords_.shape.tokens == 0) return;
  MoeSavedActivations* const activations = trains() ? saved_in(rows) : nullptr;
  if (activations) activations->layer = layer.number;
  chosen().run(x, routing, w_in, w_out, out, activations, layer);
}

MoeSavedActivations* MoeOnGpus::saved_in(MoeRows& rows) const {
  auto* activations = static_cast<MoeSavedActivations*>(rows.on_gpu.get());
  if (!activations || activations->op != number_) {
    if (is_captured(comm_.stream())) {
      throw InvalidArgument(
          "moe: a batch's first forward pass in a captured CUDA graph: expected one before it, "
          "or MoeLayer::prepare, as it allocates the batch's memory");
    }
    rows.on_gpu = make_saved();
    activations = static_cast<MoeSavedActivations*>(rows.on_gpu.get());
    rows.bytes_on_gpu = activations->bytes();
  }
  return activations;
}

int64_t MoeOnGpus::dropped_routings(const MoeOfLayer& layer) const {
  if (coords_.shape.tokens == 0) return 0;
  uint64_t count = 0;
  comm_.synchronize();
  check(cudaMemcpyAsync(&count, layer.dropped.data(), sizeof count, cudaMemcpyDeviceToHost,
                        comm_.stream()),
        "read dropped routings");
  comm_.synchronize();
  return int64_t(count);
}

void MoeOnGpus::run(size_t candidate, const Tensor& x, const MoeRouting& routing,
                    const Tensor& w_in, const Tensor& w_out, const Tensor& out,
                    MoeSavedActivations* activations, const MoeOfLayer* layer) {
  const MoeOfLayer& of = layer ? *layer : alone_;
  const Enqueueing enqueueing(comm_);
  comm_.enqueue([&] { enqueue(candidate, x, routing, w_in, w_out, out, activations, of); });
  if (activations) activations->rows = x.dim(0);
}

MoeCall MoeOnGpus::call_of(const MoeRouting& routing, const MoeOfLayer& layer) const {
  MoeCall call;
  call.table = buffer_->table();
  call.deadline = comm_.device_deadline();
  call.space = space_;
  call.grid = coords_.grid;
  call.state = state();
  call.layer = layer.number;
  call.dropped = reinterpret_cast<uint64_t*>(layer.dropped.data());
  call.token_in_rank = reinterpret_cast<uint8_t*>(token_in_rank_.data());
  call.dtype = coords_.shape.dtype;
  call.experts = routing.experts.as<const int32_t>();
  call.weights = routing.weights.as<const float>();
  call.rows = routing.experts.dim(0);
  call.position = ints(positions_);
  call.results = results_.data();
  call.link_pacer = comm_.size() > 1 ? comm_.link_pacer() : nullptr;
  call.peers_may_push = staged_sums_.data() != nullptr;
  return call;
}

MoePermutation MoeOnGpus::permutation() const {
  MoePermutation permutation;
  permutation.experts = reinterpret_cast<const int32_t*>(buffer_->local() + space_.experts_at(0));
  permutation.routings = space_.routings();
  permutation.sources = coords_.world;
  permutation.rank = coords_.rank;
  permutation.local_row = kLocalRows;
  permutation.top_k = coords_.shape.top_k;
  permutation.first = int(coords_.experts.begin);
  permutation.groups = int(coords_.experts.count);
  permutation.all_experts = coords_.shape.experts;
  permutation.counts = ints(counts_);
  permutation.source = ints(source_);
  permutation.position = ints(positions_);
  permutation.group_rows = reinterpret_cast<GroupRows*>(group_rows_.data());
  permutation.routing_idx = trains() ? ints(routing_idx_) : nullptr;
  permutation.leaving = &state()->leaving_rows;
  return permutation;
}

SortedRows MoeOnGpus::sorted() const {
  return {.dtype = experts_.dtype,
          .padded_rows = experts_.padded_rows(),
          .group_rows = reinterpret_cast<const GroupRows*>(group_rows_.data()),
          .groups = experts_.experts};
}

GroupedArrivals MoeOnGpus::arrivals() const {
  if (comm_.size() == 1) return {};
  return {buffer_->table().signals[coords_.rank] + MoeSpace::rows_signal(0),
          &state()->calls,
          extend_deadline(comm_.device_deadline()),
          OpId::all_to_all,
          coords_.rank,
          coords_.world};
}

// Rows of other ranks start at offset 0 of this rank's symmetric memory.
MoeOnGpus::Rows MoeOnGpus::uncompressed_rows(const Tensor& local) const {
  return {buffer_->local(), local.data(), arrivals()};
}

// Serial: rows have been decoded before. Fused: the decode kernel waits for their ranks and must
// time out first.
MoeOnGpus::Rows MoeOnGpus::rows_of(const Blocks& candidate, const Tensor& x) const {
  if (candidate.dispatch.is_none()) return uncompressed_rows(x);
  Rows rows{decoded_.data(), local_decoded(), {}};
  if (!candidate.overlaps_rows()) return rows;
  rows.arrivals = arrivals();
  rows.arrivals.arrived = buffer_->table().signals[coords_.rank] + MoeSpace::decoded_signal(0);
  rows.arrivals.deadline = extend_deadline(rows.arrivals.deadline);
  return rows;
}

std::byte* MoeOnGpus::local_decoded() const {
  return decoded_.data() + size_t(coords_.world - 1) * space_.source_bytes();
}

MoeGather MoeOnGpus::gathering(const Rows& rows, void* to) const {
  return {.x = rows.others,
          .local = rows.local,
          .source = ints(source_),
          .out = to,
          .columns = coords_.shape.hidden,
          .arrivals = rows.arrivals};
}

int MoeOnGpus::sending_blocks() const {
  constexpr int64_t kWarps = 32;
  return int(
      std::clamp<int64_t>((space_.tokens + kWarps - 1) / kWarps, 1, comm_.share().blocks(264, 2)));
}

GroupedArgs MoeOnGpus::first_product(const Rows& rows, const Tensor& w_in) const {
  return {.x = rows.others,
          .source = ints(source_),
          .weight = w_in.data(),
          .out = inner_.data(),
          .local = rows.local,
          .arrivals = rows.arrivals};
}

GroupedArgs MoeOnGpus::second_product(const Tensor& w_out) const {
  return {.x = inner_.data(), .weight = w_out.data(), .out = results_.data()};
}

void MoeOnGpus::multiply_alone(const Tensor& x, const Tensor& w_in, const Tensor& w_out,
                               const GradientsAlone* gradients) {
  const cudaStream_t stream = comm_.stream();
  GroupedArgs in = first_product(rows_of(blocks_.back(), x), w_in);
  in.arrivals = {};  // they have arrived
  // The buffer of sorted rows holds results by now: as many values, and equally random.
  if (blocks_[0].sorts) in.x = gradients ? gradients->activations.saved.x.data() : results_.data();
  if (gradients) in.out = gradients->activations.saved.gate_up.data();
  in_of(blocks_[0]).launch(in, stream, tables_[0].in);
  for (const int table : tables_[0].out) out_->launch(second_product(w_out), stream, table);
  if (!gradients) return;
  const bool stores = gradients->mode == WeightGradients::store;
  gradients_->multiply_d_act(w_out.data(), 0, nullptr, stream);
  gradients_->multiply_dx(w_in.data(), stream);
  gradients_->write_dw_in(sorted(), gradients->activations.saved, gradients->dw_in, stores, stream);
  gradients_->write_dw_out(sorted(), gradients->dw_out, stores, stream);
}

void MoeOnGpus::enqueue(size_t number, const Tensor& x, const MoeRouting& routing,
                        const Tensor& w_in, const Tensor& w_out, const Tensor& out,
                        MoeSavedActivations* activations, const MoeOfLayer& layer) {
  PassArgs args{.call = call_of(routing, layer),
                .candidate = number,
                .rows = x,
                .w_in = w_in,
                .w_out = w_out,
                .result = out,
                .activations = activations};
  if (joins(blocks_[number], tables_[number])) args.call.senders = &state()->senders;
  if (blocks_[number].pushes) args.call.staged_sums = staged_sums_.data();
  if (activations) {
    args.call.saved_experts = ints(activations->experts);
    args.call.saved_weights = floats(activations->weights);
    args.call.saved_call = reinterpret_cast<uint64_t*>(activations->call.data());
  }
  enqueue_pass(passes_[number], args);
}

}  // namespace tandem::gpu
