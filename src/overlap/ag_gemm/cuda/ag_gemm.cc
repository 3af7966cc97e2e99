#include "overlap/ag_gemm/cuda/ag_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "collectives/cuda/shard_exchange.h"
#include "overlap/contract/cuda/link_rates.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

enum class Written {
  cutlass,
  in_pairs,  // hand-written, in pairs of rows of tiles
  any_rows,  // hand-written, rows need not be whole pairs, optional bias
};
struct CutlassTile {
  const char* name;
  int64_t rows;
  Written written;
  std::unique_ptr<FusedAgKernel> (*make)(const FusedAgShape&);
  std::vector<DType> dtypes;

  bool takes(const FusedAgShape& shape, bool bias) const {
    const int64_t shard_rows = shape.m / shape.ranks;
    if (std::ranges::count(dtypes, shape.dtype) == 0) return false;
    if (written != Written::cutlass && shape.k < kMinHandWrittenK) return false;
    const bool whole = shape.m % (shape.ranks * rows) == 0 && !bias;
    if (written == Written::cutlass) return whole;
    const bool pairs =
        whole && schedule::has_pairs_of_rows({0, shape.ranks, int(shard_rows / rows), 1, 0});
    return pairs == (written == Written::in_pairs);
  }
};
const CutlassTile kTiles[] = {
    {"256x160", 256, Written::cutlass, make_fused_ag_256x160, {DType::bf16}},
    {"128x160", 128, Written::cutlass, make_fused_ag_128x160, {DType::bf16}},
    {"128x256 in pairs, split",
     128,
     Written::in_pairs,
     make_fused_ag_128x256,
     {DType::bf16, DType::f16}},
    {"128x128 in pairs, split", 128, Written::in_pairs, make_fused_ag_fp8, {DType::e4m3}},
    {"128x256 in pairs, any rows",
     128,
     Written::any_rows,
     make_fused_ag_any_rows,
     {DType::bf16, DType::f16}},
    {"128x128 in pairs, any rows",
     128,
     Written::any_rows,
     make_fused_ag_fp8_any_rows,
     {DType::e4m3}}};

// Values of FusedAgArgs::head.
constexpr int kHeads[] = {8, 6, 0, 4};
// A chunk takes some 5 us to send, and its fence up to twice that. More groups gain nothing.
constexpr int kCopyGroups = 3;
// With more rows the transfer is long enough for the copy engine to reach its full rate.
constexpr int64_t kMaxCopyRows = 4096;
constexpr int64_t kMaxCopyBytes = int64_t(1) << 32;  // per shard: offsets are 32-bit

bool has_fused_algorithm(const OpDesc& shape, int ranks) {
  return ranks > 1 && shape.m >= ranks && shape.result() != DType::f32 && !shape.weight_kn;
}

}  // namespace

AgGemm::AgGemm(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Algorithm algorithm)
    : comm_(comm),
      graphs_(comm),
      shape_((check_shape(comm, "ag_gemm", shape, false, true), shape)),
      whole_(lt, product_of(shape, shape.m, shape.bias)),
      pushes_(comm, kAgGemmWait, shape.m, shape.k, shape.dtype, shape.keep_gathered,
              shape.scaled_by_row()),
      has_serial_kernels_(comm.size() > 1 &&
                          has_serial_kernels(shape.m * shape.k * int64_t(size_of(shape.dtype)))),
      algorithm_(algorithm) {
  if (has_serial_kernels_) shard_exchange(comm);  // allocates, which a captured call must not
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt,
                         product_of(shape, shard_of(shape.m, comm.size(), r).count, shape.bias));
  }
  agree_on_gemm_choices(comm, lt);
  if (prepares_fused(algorithm) && has_fused_kernels(comm) &&
      has_fused_algorithm(shape, comm.size())) {
    make_fused();
  }
  if (algorithm_ != Algorithm::automatic) return;
  algorithm_ = choose_algorithm(
      comm, "ag_gemm", shape, pushes_.local().count, shape.m, algorithms(),
      [this](Algorithm w, const Tensor& x, const Tensor& weight, const Tensor& out,
             const Tensor* bias, const Scales* scales) { run(w, x, weight, out, bias, scales); });
}

std::vector<Algorithm> AgGemm::algorithms() const {
  if (comm_.size() == 1) return {Algorithm::serial_nccl};  // only the GEMM
  std::vector<Algorithm> all{Algorithm::serial_nccl, Algorithm::serial_copy, Algorithm::chunked};
  if (has_serial_kernels_) all.push_back(Algorithm::serial_kernels);
  if (!fused_.empty()) all.push_back(Algorithm::fused);
  return all;
}

void AgGemm::make_fused() {
  FusedAgShape whole{shape_.m,     shape_.n,     shape_.k,        comm_.rank(),
                     comm_.size(), shape_.dtype, shape_.result(), {}};
  whole.heads.assign(std::begin(kHeads), std::end(kHeads));
  // Copy warps count arrived rows in the peers' memory.
  const int64_t max_rows = shard_of(shape_.m, comm_.size(), 0).count;
  const bool with_copy_warps = comm_.has_peer_atomics() && shape_.m <= kMaxCopyRows &&
                               max_rows * shape_.k * int64_t(size_of(shape_.dtype)) < kMaxCopyBytes;
  for (const CutlassTile& tile : kTiles) {
    if (!tile.takes(whole, shape_.bias)) continue;
    kernels_.push_back(tile.make(whole));
    add_fused(tile.name, with_copy_warps);
  }
  if (fused_.empty()) return;
  std::vector<std::string> names;
  for (const Candidate& candidate : fused_) names.push_back(candidate.name);
  OpDesc timed = shape_;
  timed.keep_gathered = false;  // does not affect which tile is best
  fused_variant_ =
      choose_fastest(comm_, "ag_gemm fused", timed, pushes_.local().count, shape_.m, names,
                     [this](int i, const Tensor& x, const Tensor& weight, const Tensor& out,
                            const Tensor* bias, const Scales* scales) {
                       fused_[size_t(i)].run({x, weight, out, bias, scales});
                     });
}

// They differ in who transfers the shards, and in how much of the local one comes first. Measured,
// as the best depends on the ratio of transfer to GEMM time.
void AgGemm::add_fused(const char* tile, bool with_copy_warps) {
  FusedAgKernel& kernel = *kernels_.back();
  const auto add = [&](const char* name, bool by_engine, const auto& run) {
    fused_.push_back(
        {.name = fmt::format("{} {}", tile, name), .form = Strategy::overlapped, .run = run});
    kernel_of_.push_back(&kernel);
    by_engine_.push_back(by_engine);
  };
  const auto add_engine = [&](const char* name, int head) {
    add(name, true, [this, &kernel, head](const Operands& o) {
      const Tensor* x_scales = shape_.scaled_by_row() ? &o.scales->x : nullptr;
      pushes_.begin(o.x, Entering::before, x_scales);
      FusedAgArgs args{};
      args.head = head;
      args.arrivals = pushes_.arrivals();
      launch_fused(kernel, args, o);
      pushes_.end();
    });
  };
  const auto add_copy_warps = [&](const char* name, int head, int pace, bool first_alone = false) {
    add(name, false, [this, &kernel, head, pace, first_alone](const Operands& o) {
      FusedAgArgs args{};
      args.head = head;
      args.arrivals = pushes_.route_arrivals();
      args.longer = int(shape_.m % comm_.size());
      args.route = pushes_.route(o.x, shape_.scaled_by_row() ? &o.scales->x : nullptr);
      args.route.bytes_per_ns = pace;
      args.route.groups = std::min(kCopyGroups, args.route.chunks);
      args.route.first_alone = first_alone;
      launch_fused(kernel, args, o);
    });
  };
  add_engine("local first 8/8", 8);
  add_engine("local first 6/8", 6);
  if (!with_copy_warps) return;
  add_copy_warps("copy warps", 0, kLinkPace);
  add_copy_warps("copy warps, local first 4/8", 4, kLinkPace);
  add_copy_warps("slow copy warps", 0, kSlowLinkPace);
  add_copy_warps("slow copy warps, local first 4/8", 4, kSlowLinkPace);
  add_copy_warps("slow copy warps, a peer first", 8, kSlowLinkPace, true);
}

RecordedTiles AgGemm::recorded_tiles(Algorithm algorithm, int variant) const {
  return kernel_of_[size_t(known(algorithm, variant))]->recorded_tiles();
}

// Scales of gathered rows starting at `row`. A single scale is the caller's own.
ScalePointers AgGemm::scales_of(const Scales* scales, int64_t row) const {
  ScalePointers pointers = pointers_of(shape_, scales);
  if (shape_.scaled_by_row()) pointers.x = pushes_.row_scales(comm_.rank(), row);
  return pointers;
}

void AgGemm::run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias, const Scales* scales) {
  comm_.check_device();
  check_operands(comm_, "ag_gemm", shape_, pushes_.local().count, shape_.m, x, weight, out, bias,
                 scales);
  const Enqueueing call(comm_);
  const void* bias_data = bias ? bias->data() : nullptr;
  if (comm_.size() == 1) {
    if (shape_.keep_gathered) pushes_.keep_alone(x);
    return gemm_only(x, weight, out, bias, scales);
  }
  const auto replayed = [&](const auto& enqueue) {
    if (timeline_.records || pushes_.is_timed()) return comm_.enqueue(enqueue);
    const Tensor* x_scales = shape_.scaled_by_row() ? &scales->x : nullptr;
    const int variant = algorithm == Algorithm::fused ? fused_variant_ : 0;
    graphs_.run({algorithm, x, weight, out, bias, scales, {&x, x_scales}, variant}, enqueue);
  };
  switch (algorithm) {
    case Algorithm::serial_kernels:
      if (!has_serial_kernels_) break;
      return comm_.enqueue([&] { run_serial(algorithm, x, weight, out, bias_data, scales); });
    case Algorithm::serial_nccl:
      return comm_.enqueue([&] { run_serial(algorithm, x, weight, out, bias_data, scales); });
    case Algorithm::serial_copy:
      return replayed([&] { run_serial(algorithm, x, weight, out, bias_data, scales); });
    case Algorithm::chunked:
      return replayed([&] { run_chunked(x, weight, out, bias_data, scales); });
    case Algorithm::fused: {
      if (fused_.empty()) break;
      const auto run_fused = [&] {
        fused_[size_t(fused_variant_)].run({x, weight, out, bias, scales});
      };
      // With copy warps a call is a single launch.
      if (!pushes_by_engine(fused_variant_)) return comm_.enqueue(run_fused);
      return replayed(run_fused);
    }
    case Algorithm::automatic:
    case Algorithm::fused_cutlass:
    case Algorithm::one_shot:
    case Algorithm::two_shot:
      break;
  }
  throw InvalidArgument(fmt::format(
      "ag_gemm: algorithm {}: expected serial_nccl, serial_copy, chunked, serial_kernels where [M, "
      "K] "
      "has at most {} bytes (here {}), or fused where {}",
      name_of(algorithm), kMaxSerialKernelBytes,
      shape_.m * shape_.k * int64_t(size_of(shape_.dtype)),
      "there is a row for each rank, weight [N, K], a result in bf16 or f16, and K of 512 or more, "
      "or, of bf16, M is a multiple of 128 x ranks and there is no bias"));
}

void AgGemm::gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                       const Tensor* bias, const Scales* scales) {
  whole_.run(gathered.data(), weight.data(), out.data(), bias ? bias->data() : nullptr,
             comm_.stream(), pointers_of(shape_, scales));
}

void AgGemm::run_serial(Algorithm algorithm, const Tensor& x, const Tensor& weight,
                        const Tensor& out, const void* bias, const Scales* scales) {
  const void* gathered = pushes_.gather(algorithm, x, scales ? &scales->x : nullptr);
  whole_.run(gathered, weight.data(), out.data(), bias, comm_.stream(), scales_of(scales, 0));
}

void AgGemm::launch_fused(FusedAgKernel& kernel, FusedAgArgs args, const Operands& o) {
  const bool by_row = shape_.scaled_by_row();
  args.local = o.x.data();
  args.gathered = gathered().data();
  args.weight = o.weight.data();
  args.out = o.out.data();
  args.scales = {pointers_of(shape_, o.scales), by_row,
                 by_row ? pushes_.row_scales(comm_.rank(), 0) : nullptr};
  args.bias = o.bias ? o.bias->data() : nullptr;
  args.timeline = timeline_;
  kernel.launch(args, comm_.stream());
}

void AgGemm::run_chunked(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                         const Scales* scales) {
  const auto multiply = [&](int source, const Shard& rows, const void* shard) {
    const bool is_local = source == comm_.rank();
    shards_[size_t(source)].run(
        shard, weight.data(), out.rows(rows.begin, rows.count).data(), bias, comm_.stream(),
        is_local ? pointers_of(shape_, scales) : scales_of(scales, rows.begin));
  };
  pushes_.for_each_shard(x, scales ? &scales->x : nullptr, multiply);
}

}  // namespace tandem::gpu
