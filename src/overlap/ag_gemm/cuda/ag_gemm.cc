#include "overlap/ag_gemm/cuda/ag_gemm.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/cuda/shard_exchange.h"
#include "overlap/contract/cuda/link_rates.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

struct Tile {
  const char* name;
  int64_t rows;
  bool (*fits)(const FusedAgShape& shape, int64_t rows, bool bias);
  std::unique_ptr<FusedAgKernel> (*make)(const FusedAgShape&);
  std::vector<DType> dtypes;
};

bool has_whole_tiles(const FusedAgShape& shape, int64_t rows, bool bias) {
  return shape.m % (shape.ranks * rows) == 0 && !bias;
}
// CUTLASS kernels: whole tiles, no bias, weight [N, K].
bool fits_cutlass(const FusedAgShape& shape, int64_t rows, bool bias) {
  return has_whole_tiles(shape, rows, bias) && !shape.weight_kn;
}
// Hand-written kernels: the same, in pairs of rows of tiles; or any rows, with an optional bias.
bool has_whole_pairs(const FusedAgShape& shape, int64_t rows, bool bias) {
  const int tiles = int(shape.m / shape.ranks / rows);
  return shape.k >= kMinHandWrittenK && has_whole_tiles(shape, rows, bias) &&
         schedule::has_pairs_of_rows({0, shape.ranks, tiles, 1, 0});
}
bool has_other_rows(const FusedAgShape& shape, int64_t rows, bool bias) {
  return shape.k >= kMinHandWrittenK && !has_whole_pairs(shape, rows, bias);
}

const Tile kTiles[] = {
    {"256x160", 256, fits_cutlass, make_fused_ag_256x160, {DType::bf16}},
    {"128x160", 128, fits_cutlass, make_fused_ag_128x160, {DType::bf16}},
    {"128x256 in pairs, split",
     128,
     has_whole_pairs,
     make_fused_ag_128x256,
     {DType::bf16, DType::f16}},
    {"128x128 in pairs, split", 128, has_whole_pairs, make_fused_ag_fp8, {DType::e4m3}},
    {"128x256 in pairs, any rows",
     128,
     has_other_rows,
     make_fused_ag_any_rows,
     {DType::bf16, DType::f16}},
    {"128x128 in pairs, any rows", 128, has_other_rows, make_fused_ag_fp8_any_rows, {DType::e4m3}}};

// A chunk takes some 5 us to send, and its fence up to twice that. More groups gain nothing.
constexpr int kCopyGroups = 3;
// With more rows the transfer is long enough for the copy engine to reach its full rate.
constexpr int64_t kMaxCopyRows = 4096;
constexpr int64_t kMaxCopyBytes = int64_t(1) << 32;  // per shard: offsets are 32-bit

constexpr const char* kRefusal =
    "expected a GPU of compute capability 9.0 that reaches its peers without an emulated link, a "
    "row for each rank, a result in bf16 or f16, and K of 512 or more, or, of bf16, weight [N, K], "
    "M a multiple of 128 x ranks and no bias";

}  // namespace

// The best depends on the ratio of transfer to GEMM time.
struct AgGemm::Transfer {
  const char* name;
  int local_first;       ///< as FusedAgArgs::head
  int bytes_per_ns = 0;  ///< of copy warps; 0: the copy engine
  bool one_peer_first = false;
};
const AgGemm::Transfer AgGemm::kTransfers[] = {
    {"local first 8/8", 8},
    {"local first 6/8", 6},
    {"copy warps", 0, kLinkPace},
    {"copy warps, local first 4/8", 4, kLinkPace},
    {"slow copy warps", 0, kSlowLinkPace},
    {"slow copy warps, local first 4/8", 4, kSlowLinkPace},
    {"slow copy warps, a peer first", 8, kSlowLinkPace, true}};

AgGemm::AgGemm(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Strategy strategy)
    : comm_(comm),
      graphs_(comm),
      shape_((check_shape(comm, "ag_gemm", shape, false, true), shape)),
      whole_(lt, product_of(shape, shape.m, shape.bias)),
      pushes_(comm, kAgGemmWait, shape.m, shape.k, shape.dtype, shape.keep_gathered,
              shape.scaled_by_row()) {
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt,
                         product_of(shape, shard_of(shape.m, comm.size(), r).count, shape.bias));
  }
  agree_on_gemm_choices(comm, lt);
  add_candidates(strategy);
}

void AgGemm::add_candidates(Strategy strategy) {
  if (comm_.size() == 1) {
    return add(kNccl, Strategy::serial, as_call(comm_, [this](const Operands& o) {
                 if (shape_.keep_gathered) pushes_.keep_alone(o.x);
                 gemm_only(o);
               }));
  }
  const auto serial_by = [&](auto gather) {
    return [this, gather](const Operands& o) {
      const void* gathered = (pushes_.*gather)(o.x, o.scales ? &o.scales->x : nullptr);
      multiply(whole_, gathered, o.out, o, scales_of(o.scales, 0));
    };
  };
  add(kNccl, Strategy::serial, as_call(comm_, serial_by(&ShardPushes::gather_by_nccl)));
  add("serial_copy", Strategy::serial, replayed(serial_by(&ShardPushes::gather_by_copies)));
  add("chunked", Strategy::overlapped, replayed([this](const Operands& o) { run_chunked(o); }));
  if (has_serial_kernels(shape_.m * shape_.k * int64_t(size_of(shape_.dtype)))) {
    shard_exchange(comm_);  // allocates, which a captured call must not
    add("serial_kernels", Strategy::serial,
        as_call(comm_, serial_by(&ShardPushes::gather_by_kernels)));
  }
  if (strategy != Strategy::serial) add_fused();
}

void AgGemm::add(std::string_view name, Strategy form, std::function<void(const Operands&)> run) {
  candidates_.push_back({.name = std::string(name), .form = form, .run = std::move(run)});
}

template <typename Step>
std::function<void(const Operands&)> AgGemm::replayed(Step step) {
  return graphs_.as_call(candidates_.size(), std::move(step), [this](const Operands& o) {
    return std::array{&o.x, sent_scales(o)};
  });
}

void AgGemm::add_fused() {
  FusedAgShape shape{shape_.m,     shape_.n,        shape_.k, comm_.rank(),    comm_.size(),
                     shape_.dtype, shape_.result(), {},       shape_.weight_kn};
  // Copy warps count arrived rows in the peers' memory.
  const int64_t max_rows = shard_of(shape_.m, comm_.size(), 0).count;
  const bool with_copy_warps = comm_.has_peer_atomics() && shape_.m <= kMaxCopyRows &&
                               max_rows * shape_.k * int64_t(size_of(shape_.dtype)) < kMaxCopyBytes;
  std::vector<Transfer> transfers;
  for (const Transfer& transfer : kTransfers) {
    if (transfer.bytes_per_ns > 0 && !with_copy_warps) continue;
    transfers.push_back(transfer);
    shape.heads.push_back(transfer.local_first);
  }
  if (has_fused_kernels(comm_) && shape_.m >= comm_.size() && shape_.result() != DType::f32) {
    for (const Tile& tile : kTiles) {
      if (std::ranges::count(tile.dtypes, shape.dtype) == 0) continue;
      if (!tile.fits(shape, tile.rows, shape_.bias)) continue;
      kernels_.push_back(tile.make(shape));
      for (const Transfer& transfer : transfers) add_fused(*kernels_.back(), tile.name, transfer);
    }
  }
  if (!kernels_.empty()) return;
  candidates_.push_back({.name = "fused", .form = Strategy::overlapped, .refusal = kRefusal});
}

void AgGemm::add_fused(FusedAgKernel& kernel, const char* tile, const Transfer& transfer) {
  const bool by_engine = transfer.bytes_per_ns == 0;
  const std::string name = fmt::format("{} {}", tile, transfer.name);
  if (by_engine) {
    add(name, Strategy::overlapped, replayed([this, &kernel, transfer](const Operands& o) {
          pushes_.begin(o.x, Entering::before, sent_scales(o));
          FusedAgArgs args = fused_args(o, transfer.local_first);
          args.arrivals = pushes_.arrivals();
          kernel.launch(args, comm_.stream());
          pushes_.end();
        }));
  } else {  // a call is a single launch
    add(name, Strategy::overlapped, as_call(comm_, [this, &kernel, transfer](const Operands& o) {
          FusedAgArgs args = fused_args(o, transfer.local_first);
          args.arrivals = pushes_.route_arrivals();
          args.longer = int(shape_.m % comm_.size());
          args.route = pushes_.route(o.x, sent_scales(o));
          args.route.bytes_per_ns = transfer.bytes_per_ns;
          args.route.groups = std::min(kCopyGroups, args.route.chunks);
          args.route.first_alone = transfer.one_peer_first;
          kernel.launch(args, comm_.stream());
        }));
  }
  candidates_.back().family = "fused";
  fused_[name] = {&kernel, by_engine};
}

FusedAgArgs AgGemm::fused_args(const Operands& o, int local_first) const {
  const bool by_row = shape_.scaled_by_row();
  FusedAgArgs args{};
  args.local = o.x.data();
  args.gathered = gathered().data();
  args.weight = o.weight.data();
  args.out = o.out.data();
  args.scales = {pointers_of(shape_, o.scales), by_row,
                 by_row ? pushes_.row_scales(comm_.rank(), 0) : nullptr};
  args.bias = o.bias ? o.bias->data() : nullptr;
  args.head = local_first;
  args.timeline = timeline_;
  return args;
}

RecordedTiles AgGemm::recorded_tiles(const Candidate& candidate) const {
  const auto found = fused_.find(candidate.name);
  return found == fused_.end() ? RecordedTiles{} : found->second.kernel->recorded_tiles();
}

bool AgGemm::pushes_by_engine(const Candidate& candidate) const {
  const auto found = fused_.find(candidate.name);
  return found != fused_.end() && found->second.by_engine;
}

void AgGemm::record_tiles(const TileLog& log) {
  timeline_ = log;
  graphs_.enqueue_all(timeline_.records || pushes_.is_timed());
}

void AgGemm::time_pushes(std::vector<Event>* times) {
  pushes_.time(times);
  graphs_.enqueue_all(timeline_.records || pushes_.is_timed());
}

const Tensor* AgGemm::sent_scales(const Operands& o) const {
  return shape_.scaled_by_row() ? &o.scales->x : nullptr;
}

// Scales of gathered rows starting at `row`. A single scale is the caller's own.
ScalePointers AgGemm::scales_of(const Scales* scales, int64_t row) const {
  ScalePointers pointers = pointers_of(shape_, scales);
  if (shape_.scaled_by_row()) pointers.x = pushes_.row_scales(comm_.rank(), row);
  return pointers;
}

void AgGemm::multiply(const ScaledGemm& gemm, const void* rows, const Tensor& out,
                      const Operands& o, const ScalePointers& scales) const {
  gemm.run(rows, o.weight.data(), out.data(), o.bias ? o.bias->data() : nullptr, comm_.stream(),
           scales);
}

void AgGemm::gemm_only(const Operands& o) {
  multiply(whole_, o.x.data(), o.out, o, pointers_of(shape_, o.scales));
}

void AgGemm::run_chunked(const Operands& o) {
  pushes_.for_each_shard(
      o.x, o.scales ? &o.scales->x : nullptr, [&](int source, const Shard& rows, const void* x) {
        multiply(shards_[size_t(source)], x, o.out.rows(rows.begin, rows.count), o,
                 source == comm_.rank() ? pointers_of(shape_, o.scales)
                                        : scales_of(o.scales, rows.begin));
      });
}

}  // namespace tandem::gpu
