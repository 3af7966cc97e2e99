#include "overlap/gemm_rs/cuda/gemm_rs.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_nccl.h"
#include "comm/device/signal_kernels.h"
#include "kernels/cuda/reduce.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "schedule/ring.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

// Signals of the symmetric buffer, each by source rank; kAdded by ring step and chunk.
constexpr int kReady = 0, kArrived = kMaxGpus, kCutlassReady = 2 * kMaxGpus,
              kFusedReady = 3 * kMaxGpus, kAdded = 4 * kMaxGpus,
              kCutlassArrived = kAdded + FusedRsKernel::kMaxChunks * kMaxGpus;

// A chunk costs the host 5 us: a delivery must beat the earlier ones by a measurable gain.
constexpr double kGainOfDelivery = 0.005;

constexpr const char* kNeeds =
    "expected a GPU of compute capability 9.0 that reaches its peers without an emulated link, a "
    "result in bf16 or f16";

}  // namespace

// In device memory, initially zero.
struct GemmRs::Words {
  // Epochs of the pushing and of the compute stream; values sent as signals to ready peers.
  uint64_t pushed, summed, signal_value[kMaxGpus];
  CallCounter cutlass, fused;
  // State of the chunks that copy-engine deliveries push.
  static constexpr int kChunkWords = FusedRsKernel::kMaxChunks * kMaxGpus;
  uint64_t sending[kChunkWords];
  unsigned counted[kChunkWords], ready[kChunkWords];
};

namespace {

struct Tile {
  const char* name;
  DType dtype;
  int shard_rows;  // a shard must be a multiple of it
  // Send rates, in percent of the link (0: unpaced). Sending disturbs the GEMM, more so at higher
  // rates: slower is better if the link has slack.
  int paces[4];
  std::unique_ptr<CutlassRsKernel> (*make)();
};
constexpr Tile kTiles[] = {
    {"128x128", DType::bf16, 128, {100, 125, 160, 0}, make_cutlass_rs_128x128},
    {"128x256", DType::bf16, 256, {30, 60, 100, 125}, make_cutlass_rs_128x256},
    {"128x256", DType::f16, 128, {30, 60, 100, 125}, make_cutlass_rs_f16}};

// The bias is added once, by rank 0's GEMM.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& shape, int64_t rows) {
  return product_of(shape, rows, shape.bias && comm.rank() == 0);
}

std::string name_of(const TileDelivery& delivery) {
  if (delivery.chunks > 0) return fmt::format("shards in {} chunks", delivery.chunks);
  if (delivery.later > 0) return fmt::format("stored, one of {} later", delivery.later);
  return delivery.between ? "stored, local tiles between" : "stored, local tiles last";
}

}  // namespace

GemmRs::GemmRs(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Strategy strategy)
    : comm_(comm),
      graphs_(comm),
      shape_((check_shape(comm, "gemm_rs", shape, true, false), shape)),
      local_(shard_of(shape.m, comm.size(), comm.rank())),
      whole_(lt, gemm_shape(comm, shape, shape.m)),
      slot_rows_(shard_of(shape.m, comm.size(), 0).count),
      slot_bytes_(size_t(slot_rows_ * shape.n) * size_of(shape.result())),
      words_(sizeof(Words)),
      paced_(comm.link_pacer()),
      computed_(size_t(comm.size())) {
  for (int r = 0; r < comm.size(); ++r) {
    shard_gemms_.emplace_back(lt, gemm_shape(comm, shape, shard_of(shape.m, comm.size(), r).count));
  }
  agree_on_gemm_choices(comm, lt);
  if (strategy != Strategy::serial && comm.size() > 1 && has_fused_kernels(comm)) make_fused();
  partial_ = DeviceMemory(slot_bytes_ * size_t(comm.size()));
  staging_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      slot_bytes_ * size_t(comm.size()), first_fused_slice() + (comm.size() - 1) * fused_slices()));
  add_candidates(strategy);
}

void GemmRs::add(std::string_view name, Strategy form, std::function<void(const Operands&)> run) {
  candidates_.push_back({.name = std::string(name), .form = form, .run = std::move(run)});
}

void GemmRs::add_candidates(Strategy strategy) {
  if (comm_.size() == 1) {
    return add(kNccl, Strategy::serial, as_call(comm_, [this](const Operands& o) {
                 whole_.run(o.x.data(), o.weight.data(), o.out.data(),
                            o.bias ? o.bias->data() : nullptr, comm_.stream(),
                            pointers_of(shape_, o.scales));
               }));
  }
  const auto replayed = [&](bool serial) {
    return graphs_.as_call(
        candidates_.size(), [this, serial](const Operands& o) { run_pushed(o, serial); },
        [this](const Operands& o) {  // a shard's row scales may be copied for alignment
          return std::array<const Tensor*, 2>{shape_.scaled_by_row() ? &o.scales->x : nullptr};
        });
  };
  add(kNccl, Strategy::serial, as_call(comm_, [this](const Operands& o) {
        gemm_only(o);
        nccl_reduce_scatter(comm_, whole_partial(), o.out, ReduceOp::sum);
      }));
  add("serial_copy", Strategy::serial, replayed(true));
  add("chunked", Strategy::overlapped, replayed(false));
  if (has_serial_kernels(shape_.m * shape_.n * int64_t(size_of(shape_.result())))) {
    ShardExchange& exchange = shard_exchange(comm_);  // allocates, which a captured call must not
    add("serial_kernels", Strategy::serial, as_call(comm_, [this, &exchange](const Operands& o) {
          gemm_only(o);
          const Tensor whole = whole_partial();
          exchange.reduce_scatter(whole, o.out, exchange.choose(whole), kGemmRsWait);
        }));
  }
  if (strategy == Strategy::serial) return;
  add_deliveries();
  add_cutlass();
}

GemmRs::Words& GemmRs::words() const {
  return *reinterpret_cast<Words*>(words_.data());
}

void GemmRs::make_fused() {
  const int64_t ranks = comm_.size();
  if (shape_.m < ranks || shape_.result() == DType::f32) return;
  for (const Tile& tile : kTiles) {
    cutlass_kernels_.emplace_back();
    if (shape_.m % (ranks * tile.shard_rows) != 0 || tile.dtype != shape_.dtype ||
        shape_.result() != shape_.dtype || shape_.bias || shape_.weight_kn) {
      continue;
    }
    std::unique_ptr<CutlassRsKernel>& kernel = cutlass_kernels_.back();
    kernel = tile.make();
    const int tiles = kernel->tiles(slot_rows_, shape_.n);
    tiles_of_slot_ = std::max(tiles_of_slot_, tiles);
    slot_bytes_ = std::max(slot_bytes_, size_t(tiles) * kernel->tile_bytes());
  }
  const double minimum = -double(shape_.k);  // K may differ by rank
  if (-comm_.slowest({&minimum, 1})[0] < double(FusedRsKernel::kMinK)) return;
  const FusedRsShape shape = fused_shape();
  const bool whole = shape.has_whole_shards() && !shape_.bias;
  const auto make = shape_.scaled() ? (whole ? make_fused_rs_fp8 : make_fused_rs_fp8_any_rows)
                                    : (whole ? make_fused_rs : make_fused_rs_any_rows);
  fused_ = make(shape);
  slot_bytes_ = std::max(slot_bytes_, shape.slot_bytes());
}

void GemmRs::add_deliveries() {
  if (!fused_) {
    candidates_.push_back({.name = "fused",
                           .form = Strategy::overlapped,
                           .refusal = fmt::format("{}, a row for each rank, and K of {} or more",
                                                  kNeeds, FusedRsKernel::kMinK)});
    return;
  }
  const std::vector<TileDelivery>& deliveries = fused_->deliveries();
  for (size_t i = 0; i < deliveries.size(); ++i) {
    const auto run = as_call(comm_, [this, i](const Operands& o) { run_fused(o, int(i)); });
    if (deliveries[i].chunks == 0) {
      add(name_of(deliveries[i]), Strategy::overlapped, run);
    } else {
      add(name_of(deliveries[i]), Strategy::overlapped, [this, run](const Operands& o) {
        make_pushes();
        run(o);
      });
    }
    candidates_.back().family = "fused";
    candidates_.back().min_gain = kGainOfDelivery;
    recorded_[candidates_.back().name] = fused_->recorded_tiles();
  }
}

void GemmRs::add_cutlass() {
  const size_t before = candidates_.size();
  for (size_t i = 0; i < cutlass_kernels_.size(); ++i) {
    CutlassRsKernel* const kernel = cutlass_kernels_[i].get();
    if (!kernel) continue;
    for (const int pace : kTiles[i].paces) {
      add(fmt::format("{}, sending {}", kTiles[i].name,
                      pace > 0 ? fmt::format("at {} %", pace) : "unpaced"),
          Strategy::overlapped, as_call(comm_, [this, kernel, pace](const Operands& o) {
            kernel->launch(
                {shape_.m, shape_.n, shape_.k, o.x.data(), o.weight.data(), o.out.data(),
                 staging_->table(), partial_.data(), slot_bytes_, kCutlassReady, kCutlassArrived,
                 tiles_of_slot_, &words().cutlass, pace, comm_.device_deadline(), timeline_},
                comm_.stream());
          }));
      candidates_.back().family = "fused_cutlass";
      recorded_[candidates_.back().name] = kernel->recorded_tiles(shape_.m, shape_.n);
    }
  }
  if (candidates_.size() > before) return;
  candidates_.push_back(
      {.name = "fused_cutlass",
       .form = Strategy::overlapped,
       .refusal =
           fmt::format("{}, weight [N, K], no bias, and M a multiple of 128 x ranks", kNeeds)});
}

FusedRsShape GemmRs::fused_shape() const {
  return {shape_.m,        shape_.n,     shape_.k,        comm_.rank(),
          comm_.size(),    shape_.dtype, shape_.result(), shape_.scaled_by_row(),
          shape_.weight_kn};
}

int GemmRs::fused_slices() const {
  return fused_ ? int(fused_shape().slices()) : 0;
}

// Follows the signals of `fused_cutlass`.
int GemmRs::first_fused_slice() const {
  return kCutlassArrived + comm_.size() * tiles_of_slot_;
}

void GemmRs::make_pushes() {
  if (pushes_) return;
  pushes_.emplace(ChunkRoute{staging_->table(), partial_.data(), fused_shape().slot_bytes(),
                             FusedRsKernel::kMaxChunks, kAdded, words().ready, words().sending});
}

void GemmRs::settle_on(const Candidate& chosen) {
  pushes_.reset();
  if (!fused_) return;
  for (const TileDelivery& delivery : fused_->deliveries()) {
    if (delivery.chunks > 0 && name_of(delivery) == chosen.name) make_pushes();
  }
}

RecordedTiles GemmRs::recorded_tiles(const Candidate& candidate) const {
  const auto found = recorded_.find(candidate.name);
  return found == recorded_.end() ? RecordedTiles{} : found->second;
}

Tensor GemmRs::partial_of(int owner) const {
  const Shard rows = shard_of(shape_.m, comm_.size(), owner);
  return whole_partial().rows(rows.begin, rows.count);
}

Tensor GemmRs::whole_partial() const {
  return partial_.view(shape_.result(), {shape_.m, shape_.n});
}

void GemmRs::gemm_only(const Operands& o) {
  whole_.run(o.x.data(), o.weight.data(), partial_.data(), o.bias ? o.bias->data() : nullptr,
             comm_.stream(), pointers_of(shape_, o.scales));
}

// Concurrent with earlier work on the communicator's stream.
void GemmRs::enter() {
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  launch_enter(staging_->table(), kReady, {&words().pushed, nullptr, words().signal_value},
               comm_.device_deadline(), kGemmRsWait, side_.get());
}

void GemmRs::run_pushed(const Operands& o, bool serial) {
  const cudaStream_t stream = comm_.stream();
  enter();
  if (serial) gemm_only(o);
  for (int step = 0; step < comm_.size(); ++step) {
    const int owner = schedule::rs_owner(comm_.rank(), comm_.size(), step);
    const Shard rows = shard_of(shape_.m, comm_.size(), owner);
    const Tensor partial = partial_of(owner);
    if (!serial) {
      shard_gemms_[size_t(owner)].run(o.x.rows(rows.begin, rows.count).data(), o.weight.data(),
                                      partial.data(), o.bias ? o.bias->data() : nullptr, stream,
                                      pointers_of(shape_, o.scales, rows.begin));
    }
    if (owner == comm_.rank()) continue;
    computed_[size_t(owner)].record(stream);
    computed_[size_t(owner)].block(side_.get());
    push(owner, partial);
  }
  pushed_.record(side_.get());
  sum_partials(o.out);
  pushed_.block(stream);
}

void GemmRs::run_fused(const Operands& o, int delivery) {
  const cudaStream_t stream = comm_.stream();
  const auto launch = [&] {
    fused_->launch({o.x.data(), o.weight.data(), o.out.data(), pointers_of(shape_, o.scales),
                    partial_.data(), staging_->local(), staging_->table(), kFusedReady, kAdded,
                    first_fused_slice(), &words().fused, words().counted, words().ready,
                    words().sending, delivery, comm_.device_deadline(), timeline_,
                    o.bias && comm_.rank() == 0 ? o.bias->data() : nullptr},
                   stream);
  };
  const int chunks = fused_->deliveries()[size_t(delivery)].chunks;
  chunks > 0 ? pushes_->run(chunks, stream, launch) : launch();
}

// Copies to this rank's slot of the owner's staging memory, then sends the epoch if the owner is
// ready.
void GemmRs::push(int owner, const Tensor& partial) {
  const PeerTable& table = staging_->table();
  paced_.begin(int64_t(partial.bytes()), side_.get());
  check(cudaMemcpyAsync(table.memory[owner] + slot_bytes_ * size_t(comm_.rank()), partial.data(),
                        partial.bytes(), cudaMemcpyDefault, side_.get()),
        "push a shard");
  paced_.end(side_.get());
  check(
      cudaMemcpyAsync(table.signals[owner] + kArrived + comm_.rank(), words().signal_value + owner,
                      sizeof(uint64_t), cudaMemcpyDefault, side_.get()),
      "signal a shard");
}

void GemmRs::sum_partials(const Tensor& out) {
  launch_wait(staging_->table(), kArrived, -1, &words().summed, true, comm_.device_deadline(),
              kGemmRsWait, comm_.stream());
  Partials partials;
  partials.count = comm_.size();
  for (int r = 0; r < comm_.size(); ++r) {
    partials.of[r] =
        r == comm_.rank() ? partial_of(r).data() : staging_->local() + slot_bytes_ * size_t(r);
  }
  launch_sum(partials, out, comm_.stream());
}

}  // namespace tandem::gpu
