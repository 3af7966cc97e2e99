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

struct CutlassTile {
  static constexpr int kPaces = 4;
  const char* name;
  DType dtype;
  int shard_rows;  // a shard must be a multiple of it
  int paces[kPaces];
  std::unique_ptr<CutlassRsKernel> (*make)();
};

namespace {

// Signals of the symmetric buffer, each by source rank; kAdded by ring step and chunk.
constexpr int kReady = 0, kArrived = kMaxGpus, kCutlassReady = 2 * kMaxGpus,
              kFusedReady = 3 * kMaxGpus, kAdded = 4 * kMaxGpus,
              kCutlassArrived = kAdded + FusedRsKernel::kMaxChunks * kMaxGpus;

// A chunk costs the host 5 us: a delivery must beat the earlier ones by a measurable gain.
constexpr double kGainOfPlan = 0.005;

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

// Send rates, in percent of the link (0: unpaced). Sending disturbs the GEMM, more so at higher
// rates: slower is better if the link has slack.
constexpr int kPaceCount = CutlassTile::kPaces;
constexpr CutlassTile kTiles[] = {
    {"128x128", DType::bf16, 128, {100, 125, 160, 0}, make_cutlass_rs_128x128},
    {"128x256", DType::bf16, 256, {30, 60, 100, 125}, make_cutlass_rs_128x256},
    {"128x256", DType::f16, 128, {30, 60, 100, 125}, make_cutlass_rs_f16}};

// The bias is added once, by rank 0's GEMM.
GemmShape gemm_shape(const GpuCommunicator& comm, const OpDesc& shape, int64_t rows) {
  return product_of(shape, rows, shape.bias && comm.rank() == 0);
}

}  // namespace

GemmRs::GemmRs(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Algorithm algorithm)
    : comm_(comm),
      graphs_(comm),
      shape_((check_shape(comm, "gemm_rs", shape, true, false), shape)),
      local_(shard_of(shape.m, comm.size(), comm.rank())),
      whole_(lt, gemm_shape(comm, shape, shape.m)),
      slot_rows_(shard_of(shape.m, comm.size(), 0).count),
      slot_bytes_(size_t(slot_rows_ * shape.n) * size_of(shape.result())),
      words_(sizeof(Words)),
      paced_(comm.link_pacer()),
      computed_(size_t(comm.size())),
      has_serial_kernels_(comm.size() > 1 &&
                          has_serial_kernels(shape.m * shape.n * int64_t(size_of(shape.result())))),
      algorithm_(algorithm) {
  if (has_serial_kernels_) shard_exchange(comm);  // allocates, which a captured call must not
  for (int r = 0; r < comm.size(); ++r) {
    shard_gemms_.emplace_back(lt, gemm_shape(comm, shape, shard_of(shape.m, comm.size(), r).count));
  }
  agree_on_gemm_choices(comm, lt);
  for (const CutlassTile& tile : kTiles) {
    if (!prepares_fused(algorithm) || !has_fused_kernels(comm) || comm.size() == 1 ||
        shape.m == 0 || shape.m % (comm.size() * tile.shard_rows) != 0 ||
        tile.dtype != shape.dtype || shape.result() != shape.dtype || shape.bias ||
        shape.weight_kn) {
      continue;
    }
    cutlass_kernels_.push_back({&tile, tile.make()});
    const CutlassRsKernel& kernel = *cutlass_kernels_.back().kernel;
    const int tiles = kernel.tiles(slot_rows_, shape.n);
    tiles_of_slot_ = std::max(tiles_of_slot_, tiles);
    slot_bytes_ = std::max(slot_bytes_, size_t(tiles) * kernel.tile_bytes());
  }
  if (prepares_fused(algorithm)) make_fused();
  partial_ = DeviceMemory(slot_bytes_ * size_t(comm.size()));
  staging_ = std::static_pointer_cast<GpuBuffer>(comm.allocate(
      slot_bytes_ * size_t(comm.size()), first_fused_slice() + (comm.size() - 1) * fused_slices()));
  choose_variant(Algorithm::fused, {kGainOfPlan, kGainOfPlan});
  choose_variant(Algorithm::fused_cutlass, {});
  if (algorithm_ != Algorithm::automatic) return;
  algorithm_ = choose_algorithm(
      comm, "gemm_rs", shape, shape.m, local_.count, algorithms(),
      [this](Algorithm w, const Tensor& x, const Tensor& weight, const Tensor& out,
             const Tensor* bias, const Scales* scales) { run(w, x, weight, out, bias, scales); });
}

std::vector<Algorithm> GemmRs::algorithms() const {
  if (comm_.size() == 1) return {Algorithm::serial_nccl};  // only the GEMM
  std::vector<Algorithm> all{Algorithm::serial_nccl, Algorithm::serial_copy, Algorithm::chunked};
  if (has_serial_kernels_) all.push_back(Algorithm::serial_kernels);
  if (fused_) all.push_back(Algorithm::fused);
  if (!cutlass_kernels_.empty()) all.push_back(Algorithm::fused_cutlass);
  return all;
}

GemmRs::Words& GemmRs::words() const {
  return *reinterpret_cast<Words*>(words_.data());
}

void GemmRs::make_fused() {
  const int size = comm_.size();
  if (size == 1 || shape_.m < size || shape_.result() == DType::f32 || shape_.weight_kn ||
      !has_fused_kernels(comm_)) {
    return;
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

void GemmRs::choose_variant(Algorithm algorithm, Margin margin) {
  std::vector<std::string> names;
  for (int i = 0; i < variants(algorithm); ++i) names.push_back(variant_name(algorithm, i));
  if (names.size() < 2) return;
  const int fastest = choose_fastest(
      comm_, fmt::format("gemm_rs {}", name_of(algorithm)), shape_, shape_.m, local_.count, names,
      [this, algorithm](int variant, const Tensor& x, const Tensor& weight, const Tensor& out,
                        const Tensor* bias, const Scales* scales) {
        use_variant(algorithm, variant);
        run(algorithm, x, weight, out, bias, scales);
      },
      margin);
  if (algorithm == Algorithm::fused) pushes_.reset();  // streams and graphs of losing deliveries
  use_variant(algorithm, fastest);
}

FusedRsShape GemmRs::fused_shape() const {
  return {shape_.m,     shape_.n,     shape_.k,        comm_.rank(),
          comm_.size(), shape_.dtype, shape_.result(), shape_.scaled_by_row()};
}

int GemmRs::fused_slices() const {
  return fused_ ? int(fused_shape().slices()) : 0;
}

// Follows the signals of `fused_cutlass`.
int GemmRs::first_fused_slice() const {
  return kCutlassArrived + comm_.size() * tiles_of_slot_;
}

int GemmRs::variants(Algorithm algorithm) const {
  if (algorithm == Algorithm::fused) return fused_ ? int(fused_->deliveries().size()) : 0;
  return algorithm == Algorithm::fused_cutlass ? int(cutlass_kernels_.size()) * kPaceCount : 0;
}

void GemmRs::use_variant(Algorithm algorithm, int variant) {
  (algorithm == Algorithm::fused ? fused_variant_ : cutlass_variant_) = known(algorithm, variant);
  if (algorithm != Algorithm::fused) return;
  if (fused_delivery().chunks == 0 || pushes_) return;
  pushes_.emplace(ChunkRoute{staging_->table(), partial_.data(), fused_shape().slot_bytes(),
                             FusedRsKernel::kMaxChunks, kAdded, words().ready, words().sending});
}

const TileDelivery& GemmRs::fused_delivery() const {
  return fused_->deliveries()[size_t(fused_variant_)];
}

RecordedTiles GemmRs::recorded_tiles(Algorithm algorithm, int variant) const {
  known(algorithm, variant);
  if (algorithm == Algorithm::fused) return fused_->recorded_tiles();
  return cutlass_kernels_[size_t(variant / kPaceCount)].kernel->recorded_tiles(shape_.m, shape_.n);
}

std::string GemmRs::variant_name(Algorithm algorithm, int variant) const {
  if (algorithm == Algorithm::fused) {
    const TileDelivery& delivery = fused_->deliveries()[size_t(variant)];
    if (delivery.chunks > 0) return fmt::format("shards in {} chunks", delivery.chunks);
    if (delivery.later > 0) return fmt::format("stored, one of {} later", delivery.later);
    return delivery.between ? "stored, local tiles between" : "stored, local tiles last";
  }
  const int pace = pace_of(variant);
  return fmt::format("{}, sending {}", cutlass_kernels_[size_t(variant / kPaceCount)].tile->name,
                     pace > 0 ? fmt::format("at {} %", pace) : "unpaced");
}

int GemmRs::pace_of(int variant) const {
  return cutlass_kernels_[size_t(variant / kPaceCount)].tile->paces[variant % kPaceCount];
}

Tensor GemmRs::partial_of(int owner) const {
  const Shard rows = shard_of(shape_.m, comm_.size(), owner);
  return whole_partial().rows(rows.begin, rows.count);
}

Tensor GemmRs::whole_partial() const {
  return partial_.view(shape_.result(), {shape_.m, shape_.n});
}

void GemmRs::gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias,
                       const Scales* scales) {
  whole_.run(x.data(), weight.data(), partial_.data(), bias ? bias->data() : nullptr,
             comm_.stream(), pointers_of(shape_, scales));
}

void GemmRs::run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias, const Scales* scales) {
  comm_.check_device();
  check_operands(comm_, "gemm_rs", shape_, shape_.m, local_.count, x, weight, out, bias, scales);
  const Enqueueing call(comm_);
  const void* bias_data = bias ? bias->data() : nullptr;
  if (comm_.size() == 1) {
    return whole_.run(x.data(), weight.data(), out.data(), bias_data, comm_.stream(),
                      pointers_of(shape_, scales));
  }
  switch (algorithm) {
    case Algorithm::serial_nccl:
      return comm_.enqueue([&] {
        gemm_only(x, weight, bias, scales);
        run_nccl(out);
      });
    case Algorithm::serial_kernels:
      if (!has_serial_kernels_) break;
      return comm_.enqueue([&] {
        gemm_only(x, weight, bias, scales);
        run_serial_kernels(out);
      });
    case Algorithm::serial_copy:
    case Algorithm::chunked:
      // A shard's row scales may be copied for alignment.
      return graphs_.run({algorithm,
                          x,
                          weight,
                          out,
                          bias,
                          scales,
                          {shape_.scaled_by_row() ? &scales->x : nullptr}},
                         [&] { run_pushed(algorithm, x, weight, out, bias_data, scales); });
    case Algorithm::fused:
      if (!fused_) break;
      return comm_.enqueue([&] { run_fused(x, weight, out, bias_data, scales); });
    case Algorithm::fused_cutlass:
      if (cutlass_kernels_.empty()) break;
      return comm_.enqueue([&] { run_cutlass(x, weight, out); });
    case Algorithm::automatic:
    case Algorithm::one_shot:
    case Algorithm::two_shot:
      break;
  }
  throw InvalidArgument(fmt::format(
      "gemm_rs: algorithm {}: expected serial_nccl, serial_copy, chunked, serial_kernels where [M, "
      "N] has "
      "at most {} bytes (here {}), or, prepared when the operator was made and with weight [N, K], "
      "fused_cutlass "
      "where M is a multiple of 128 x ranks, bf16 or f16, no bias, and fused where there is a row "
      "for each rank, a result in bf16 or f16, K from {} on",
      name_of(algorithm), kMaxSerialKernelBytes,
      shape_.m * shape_.n * int64_t(size_of(shape_.result())), FusedRsKernel::kMinK));
}

// Concurrent with earlier work on the communicator's stream.
void GemmRs::enter() {
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  launch_enter(staging_->table(), kReady, {&words().pushed, nullptr, words().signal_value},
               comm_.device_deadline(), kGemmRsWait, side_.get());
}

void GemmRs::run_pushed(Algorithm algorithm, const Tensor& x, const Tensor& weight,
                        const Tensor& out, const void* bias, const Scales* scales) {
  const cudaStream_t stream = comm_.stream();
  enter();
  if (algorithm == Algorithm::serial_copy) {
    whole_.run(x.data(), weight.data(), partial_.data(), bias, stream, pointers_of(shape_, scales));
  }
  for (int step = 0; step < comm_.size(); ++step) {
    const int owner = schedule::rs_owner(comm_.rank(), comm_.size(), step);
    const Shard rows = shard_of(shape_.m, comm_.size(), owner);
    const Tensor partial = partial_of(owner);
    if (algorithm == Algorithm::chunked) {
      shard_gemms_[size_t(owner)].run(x.rows(rows.begin, rows.count).data(), weight.data(),
                                      partial.data(), bias, stream,
                                      pointers_of(shape_, scales, rows.begin));
    }
    if (owner == comm_.rank()) continue;
    computed_[size_t(owner)].record(stream);
    computed_[size_t(owner)].block(side_.get());
    push(owner, partial);
  }
  pushed_.record(side_.get());
  sum_partials(out);
  pushed_.block(stream);
}

void GemmRs::run_fused(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                       const Scales* scales) {
  const cudaStream_t stream = comm_.stream();
  const auto launch = [&] {
    fused_->launch(
        {x.data(), weight.data(), out.data(), pointers_of(shape_, scales), partial_.data(),
         staging_->local(), staging_->table(), kFusedReady, kAdded, first_fused_slice(),
         &words().fused, words().counted, words().ready, words().sending, fused_variant_,
         comm_.device_deadline(), timeline_, comm_.rank() == 0 ? bias : nullptr},
        stream);
  };
  const int chunks = fused_delivery().chunks;
  chunks > 0 ? pushes_->run(chunks, stream, launch) : launch();
}

void GemmRs::run_cutlass(const Tensor& x, const Tensor& weight, const Tensor& out) {
  const CutlassRsArgs args{shape_.m,
                           shape_.n,
                           shape_.k,
                           x.data(),
                           weight.data(),
                           out.data(),
                           staging_->table(),
                           partial_.data(),
                           slot_bytes_,
                           kCutlassReady,
                           kCutlassArrived,
                           tiles_of_slot_,
                           &words().cutlass,
                           pace_of(cutlass_variant_),
                           comm_.device_deadline(),
                           timeline_};
  cutlass_kernels_[size_t(cutlass_variant_ / kPaceCount)].kernel->launch(args, comm_.stream());
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

void GemmRs::run_nccl(const Tensor& out) {
  nccl_reduce_scatter(comm_, whole_partial(), out, ReduceOp::sum);
}

void GemmRs::run_serial_kernels(const Tensor& out) {
  const Tensor whole = whole_partial();
  ShardExchange& exchange = shard_exchange(comm_);
  exchange.reduce_scatter(whole, out, exchange.choose(whole), kGemmRsWait);
}

}  // namespace tandem::gpu
