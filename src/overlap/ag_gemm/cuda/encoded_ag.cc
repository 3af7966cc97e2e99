#include "overlap/ag_gemm/cuda/encoded_ag.h"

#include <algorithm>
#include <iterator>

#include "codec/message.h"
#include "codec/numbers.h"
#include "schedule/ring.h"

namespace tandem::gpu {
namespace {

// Signals of the inbox, by source; the last ones also by chunk.
constexpr int kReady = 0, kArrived = kMaxGpus;
constexpr int kTileRows = 128;
// A chunk's release waits until its stores have arrived; meanwhile blocks of other groups send.
constexpr int kGroups = 3;

struct Instance {
  Wire wire;
  std::unique_ptr<FusedAgKernel> (*make)(const FusedAgShape&);
};
const Instance kInstances[] = {{{.codec = Codec::int8}, make_encoded_ag_int8},
                               {{.codec = Codec::int4}, make_encoded_ag_int4},
                               {{.codec = Codec::int4, .group = 32}, make_encoded_ag_int4_g32}};

}  // namespace

std::unique_ptr<FusedEncoded> EncodedAgOp::make(GpuCommunicator& comm, const OpDesc& desc) {
  const int size = comm.size();
  const auto* const found = std::ranges::find(kInstances, desc.wire, &Instance::wire);
  // Copy warps count arrived rows in the peers' memory.
  if (found == std::end(kInstances) || size == 1 || !has_fused_kernels(comm) ||
      !comm.has_peer_atomics() || desc.dtype != DType::bf16 || desc.result() != DType::bf16 ||
      desc.bias || desc.weight_kn || desc.keep_gathered || desc.k % kWireBlock != 0 ||
      desc.k < kMinHandWrittenK || desc.m == 0 || desc.m % (size * kTileRows) != 0) {
    return nullptr;
  }
  const int tiles = int(desc.m / size / kTileRows);
  if (!schedule::has_pairs_of_rows({0, size, tiles, 1, 0})) return nullptr;
  const FusedAgShape shape{
      desc.m, desc.n,     desc.k,        comm.rank(),
      size,   desc.dtype, desc.result(), {std::begin(kHeads), std::end(kHeads)}};
  return std::unique_ptr<EncodedAgOp>(new EncodedAgOp(comm, desc, found->make(shape)));
}

EncodedAgOp::EncodedAgOp(GpuCommunicator& comm, const OpDesc& shape,
                         std::unique_ptr<FusedAgKernel> kernel)
    : comm_(comm),
      shape_(shape),
      rows_(int(shape.m / comm.size())),
      chunks_(int((shape.k * 2 + kCopyItemBytes - 1) / kCopyItemBytes)),
      chunk_bytes_(
          size_t(encoded_chunk_bytes(codec::code_bits(shape.wire.codec), shape.wire.group))),
      kernel_(std::move(kernel)),
      inbox_(std::static_pointer_cast<GpuBuffer>(
          comm.allocate(size_t(comm.size()) * size_t(chunks_) * size_t(rows_) * chunk_bytes_,
                        kArrived + comm.size() * chunks_))),
      gathered_(size_t(shape.m * shape.k) * 2),
      decoded_(size_t(comm.size() * chunks_) * sizeof(uint64_t)),
      calls_(sizeof(CallCounter)) {}

EncodedShardRoute EncodedAgOp::route(const Tensor& x) const {
  const PeerTable& table = inbox_->table();
  const int rank = comm_.rank();
  const size_t source_bytes = size_t(chunks_) * size_t(rows_) * chunk_bytes_;
  EncodedShardRoute route;
  route.targets = comm_.size() - 1;
  route.groups = std::min(kGroups, chunks_);
  route.from = static_cast<const std::byte*>(x.data());
  route.rows = rows_;
  route.row_bytes = int(shape_.k) * 2;
  route.chunks = chunks_;
  for (int stop = 0; stop < route.targets; ++stop) {
    const int to = schedule::ag_target(rank, comm_.size(), stop + 1);
    route.to[stop] = table.memory[to] + size_t(rank) * source_bytes;
    route.arrived[stop] = table.signals[to] + kArrived + rank * chunks_;
    route.enter[stop] = table.signals[to] + kReady + rank;
    route.ready_flags[stop] = table.signals[rank] + kReady + to;
    route.rank_of[stop] = to;
  }
  route.calls = calls();
  route.deadline = comm_.device_deadline();
  route.rank = rank;
  route.size = comm_.size();
  route.inbox = inbox_->local();
  route.received = table.signals[rank] + kArrived;
  route.gathered = gathered_.data();
  route.decoded = reinterpret_cast<uint64_t*>(decoded_.data());
  route.limit = codec::largest_of(DType::bf16);
  return route;
}

void EncodedAgOp::run(int head, const Operands& o) {
  FusedAgArgs args{};
  args.local = o.x.data();
  args.gathered = gathered_.data();
  args.weight = o.weight.data();
  args.out = o.out.data();
  args.head = head;
  args.arrivals = {.arrived = reinterpret_cast<const uint64_t*>(decoded_.data()),
                   .chunks = chunks_,
                   .chunk_bytes = kCopyItemBytes,
                   .epoch = &calls()->epoch,
                   .ahead = 1,
                   .counts_per_chunk = unsigned(rows_),
                   .deadline = extend_deadline(comm_.device_deadline())};
  args.encoded = route(o.x);
  args.route = args.encoded;
  kernel_->launch(args, comm_.stream());
}

std::vector<Candidate> EncodedAgOp::candidates() {
  std::vector<Candidate> all;
  for (const int head : kHeads) {
    all.push_back({.name = head == 8 ? "fused" : "fused, local first 4/8,",
                   .form = Strategy::overlapped,
                   .run = [this, head](const Operands& o) { run(head, o); }});
  }
  return all;
}

}  // namespace tandem::gpu
