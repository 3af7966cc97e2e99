#include "overlap/ag_gemm/cuda/ag_gemm.h"

#include <fmt/format.h>

#include <iterator>

#include "comm/nccl/signal_kernels.h"

namespace tandem::gpu {
namespace {

// Signals of the symmetric buffer, each by source rank.
constexpr int kEntered = 0, kArrived = kMaxGpus, kSignals = 2 * kMaxGpus;

// Columns of the own shard that go first, in eighths. Which is best depends on how long the wire is
// beside the product, so they are measured.
constexpr int kHeads[] = {8, 6, 4, 3};
constexpr int kHeadCount = int(std::size(kHeads));
struct FusedTile {
  const char* name;
  int64_t rows;
  std::unique_ptr<FusedAgKernel> (*make)();
};
constexpr FusedTile kTiles[] = {{"256x160", 256, make_fused_ag_256x160},
                                {"256x192", 256, make_fused_ag_256x192},
                                {"128x160", 128, make_fused_ag_128x160},
                                {"128x176", 128, make_fused_ag_128x176}};

bool has_fused_way(const DenseShape& shape, int ranks) {
  return ranks > 1 && shape.m > 0 && shape.m % (ranks * 128) == 0 && shape.dtype == DType::bf16 &&
         !shape.bias && !shape.weight_is_kn;
}

}  // namespace

AgGemm::AgGemm(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape, Way way)
    : comm_(comm),
      shape_((check_shape(comm, "ag_gemm", shape, false, true), shape)),
      mine_(shard_of(shape.m, comm.size(), comm.rank())),
      whole_(lt, shape.product(shape.m, shape.bias)),
      scales_at_((size_t(shape.m * shape.k) * size_of(shape.dtype) + 255) / 256 * 256),
      epochs_(2 * sizeof(uint64_t)),
      way_(way) {
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt, shape.product(shard_of(shape.m, comm.size(), r).count, shape.bias));
  }
  gathered_ = std::static_pointer_cast<NcclBuffer>(comm.allocate(
      scales_at_ + (shape.scaled_by_row() ? size_t(shape.m) * sizeof(float) : 0), kSignals));
  if (has_fused_kernels(comm) && has_fused_way(shape, comm.size())) {
    for (const FusedTile& tile : kTiles) {
      if (mine_.count % tile.rows != 0) continue;
      kernels_.push_back(tile.make());
      tiles_.push_back(tile.name);
    }
    const auto run_variant = [this](int variant, const Tensor& x, const Tensor& weight,
                                    const Tensor& out, const Tensor*, const Scales*) {
      fused_variant_ = variant;
      run_fused(x, weight, out);
    };
    fused_variant_ = choose_fastest(comm, "ag_gemm fused", shape, mine_.count, shape.m,
                                    variant_names(), run_variant);
  }
  if (way_ != Way::automatic) return;
  way_ = choose_way(
      comm, "ag_gemm", shape, mine_.count, shape.m, ways(),
      [this](Way w, const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
             const Scales* scales) { run(w, x, weight, out, bias, scales); });
}

std::vector<Way> AgGemm::ways() const {
  std::vector<Way> all{Way::serial_copy, Way::chunked};
  // NCCL gathers equal shards only.
  if (shape_.m % comm_.size() == 0) all.insert(all.begin(), Way::serial_nccl);
  if (!kernels_.empty()) all.push_back(Way::fused);
  return all;
}

int AgGemm::fused_variants() const {
  return int(kernels_.size()) * kHeadCount;
}

std::vector<std::string> AgGemm::variant_names() const {
  std::vector<std::string> names;
  for (int i = 0; i < fused_variants(); ++i) names.push_back(variant_name(i));
  return names;
}

std::string AgGemm::variant_name(int variant) const {
  return fmt::format("{} head {}/8", tiles_[size_t(variant / kHeadCount)],
                     kHeads[variant % kHeadCount]);
}

Tensor AgGemm::gathered() const {
  return Tensor(gathered_->local(), shape_.dtype, {shape_.m, shape_.k},
                {DeviceKind::cuda, comm_.device()});
}

std::byte* AgGemm::gathered_rows(int at, int64_t row) const {
  return gathered_->peer(at) + size_t(row * shape_.k) * size_of(shape_.dtype);
}

float* AgGemm::gathered_scales(int at, int64_t row) const {
  return reinterpret_cast<float*>(gathered_->peer(at) + scales_at_) + row;
}

// Of gathered rows from `row` on. One scale is the caller's own.
ScalePointers AgGemm::scales_of(const Scales* scales, int64_t row) const {
  ScalePointers pointers = shape_.pointers(scales);
  if (shape_.scaled_by_row()) pointers.x = gathered_scales(comm_.rank(), row);
  return pointers;
}

void AgGemm::run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias, const Scales* scales) {
  comm_.check_device();
  check_operands(comm_, "ag_gemm", shape_, mine_.count, shape_.m, x, weight, out, bias, scales);
  const void* bias_data = bias ? bias->data() : nullptr;
  switch (way) {
    case Way::serial_nccl:
    case Way::serial_copy:
      return run_serial(way, x, weight, out, bias_data, scales);
    case Way::chunked:
      return run_chunked(x, weight, out, bias_data, scales);
    case Way::fused:
      if (kernels_.empty()) break;
      return run_fused(x, weight, out);
    case Way::automatic:
    case Way::one_shot:
    case Way::two_shot:
      break;
  }
  throw InvalidArgument(
      fmt::format("ag_gemm: way {}: expected serial_nccl, serial_copy, chunked, or fused where {}",
                  name_of(way), "M is a multiple of 128 x ranks, bf16, no bias, weight [N, K]"));
}

void AgGemm::gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                       const Tensor* bias, const Scales* scales) {
  whole_.run(gathered.data(), weight.data(), out.data(), bias ? bias->data() : nullptr,
             comm_.stream(), shape_.pointers(scales));
}

// Entering on the side stream lets the own shard's product start at once; the product then counts
// its epochs itself. Entering on the main stream keeps a kernel that fills the GPU from starting
// before the one that it waits for.
void AgGemm::push_shards(const Tensor& x, const Scales* scales, cudaStream_t entering) {
  auto* epoch = reinterpret_cast<uint64_t*>(epochs_.data());
  const PeerTable& table = gathered_->table();
  const bool on_side = entering == side_.get();
  if (!on_side) {
    launch_enter(table, kEntered, epoch, comm_.watch(), OpId::ag_gemm, entering, epoch + 1);
  }
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  if (on_side) launch_enter(table, kEntered, epoch, comm_.watch(), OpId::ag_gemm, entering);
  for (int step = 1; step < comm_.size(); ++step) {
    const int to = (comm_.rank() + comm_.size() - step) % comm_.size();
    check(cudaMemcpyAsync(gathered_rows(to, mine_.begin), x.data(), x.bytes(), cudaMemcpyDefault,
                          side_.get()),
          "push a shard");
    if (shape_.scaled_by_row()) {
      check(cudaMemcpyAsync(gathered_scales(to, mine_.begin), scales->x.data(), scales->x.bytes(),
                            cudaMemcpyDefault, side_.get()),
            "push a shard's scales");
    }
    // The signal is a copy too: it follows the data, and reads the epoch when it runs.
    check(cudaMemcpyAsync(table.signals[to] + kArrived + comm_.rank(), epoch, sizeof *epoch,
                          cudaMemcpyDefault, side_.get()),
          "signal a shard");
  }
  pushed_.record(side_.get());
}

void AgGemm::run_serial(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                        const void* bias, const Scales* scales) {
  const cudaStream_t stream = comm_.stream();
  const void* gathered = gathered_->local();
  ScalePointers pointers = scales_of(scales, 0);
  if (comm_.size() == 1) {
    gathered = x.data();
    pointers = shape_.pointers(scales);
  } else if (way == Way::serial_nccl) {
    if (shape_.scaled_by_row()) check(ncclGroupStart(), "ncclGroupStart");
    check(
        ncclAllGather(x.data(), gathered_->local(), size_t(x.elements()),
                      shape_.scaled() ? ncclUint8 : nccl_type(shape_.dtype), comm_.nccl(), stream),
        "ncclAllGather");
    if (shape_.scaled_by_row()) {
      check(ncclAllGather(scales->x.data(), gathered_scales(comm_.rank(), 0),
                          size_t(scales->x.elements()), ncclFloat32, comm_.nccl(), stream),
            "ncclAllGather of the scales");
      check(ncclGroupEnd(), "ncclGroupEnd");
    }
  } else {
    push_shards(x, scales, side_.get());
    check(cudaMemcpyAsync(gathered_rows(comm_.rank(), mine_.begin), x.data(), x.bytes(),
                          cudaMemcpyDefault, stream),
          "copy the own shard");
    if (shape_.scaled_by_row()) {
      check(cudaMemcpyAsync(gathered_scales(comm_.rank(), mine_.begin), scales->x.data(),
                            scales->x.bytes(), cudaMemcpyDefault, stream),
            "copy the own scales");
    }
    launch_wait(gathered_->table(), kArrived, -1, reinterpret_cast<uint64_t*>(epochs_.data()) + 1,
                true, comm_.watch(), OpId::ag_gemm, stream);
    pushed_.block(stream);
  }
  whole_.run(gathered, weight.data(), out.data(), bias, stream, pointers);
}

void AgGemm::run_fused(const Tensor& x, const Tensor& weight, const Tensor& out) {
  push_shards(x, nullptr, comm_.stream());
  const FusedAgJob job{shape_.m,
                       shape_.n,
                       shape_.k,
                       x.data(),
                       gathered_->local(),
                       weight.data(),
                       out.data(),
                       comm_.rank(),
                       comm_.size(),
                       kHeads[fused_variant_ % kHeadCount],
                       gathered_->table().signals[comm_.rank()] + kArrived,
                       reinterpret_cast<const uint64_t*>(epochs_.data()),
                       comm_.watch()};
  kernels_[size_t(fused_variant_ / kHeadCount)]->launch(job, comm_.stream());
  pushed_.block(comm_.stream());
}

void AgGemm::run_chunked(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                         const Scales* scales) {
  const cudaStream_t stream = comm_.stream();
  if (comm_.size() > 1) push_shards(x, scales, side_.get());
  auto* epoch = reinterpret_cast<uint64_t*>(epochs_.data()) + 1;
  for (int step = 0; step < comm_.size(); ++step) {
    const int source = (comm_.rank() + step) % comm_.size();
    const Shard rows = shard_of(shape_.m, comm_.size(), source);
    if (step > 0) {
      launch_wait(gathered_->table(), kArrived, source, epoch, step == 1, comm_.watch(),
                  OpId::ag_gemm, stream);
    }
    const void* shard = step == 0 ? x.data() : gathered_rows(comm_.rank(), rows.begin);
    shards_[size_t(source)].run(
        shard, weight.data(), out.rows(rows.begin, rows.count).data(), bias, stream,
        step == 0 ? shape_.pointers(scales) : scales_of(scales, rows.begin));
  }
  if (comm_.size() > 1) pushed_.block(stream);
}

}  // namespace tandem::gpu
