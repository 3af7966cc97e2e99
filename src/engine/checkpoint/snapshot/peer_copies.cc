#include "engine/checkpoint/snapshot/peer_copies.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "comm/processes/shared/shared_memory.h"
#include "comm/world/host_ranks.h"
#include "engine/parallel/collective_check.h"
#include "gemm/gemm.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

constexpr size_t kCopyChunk = size_t{4} << 20;
/// In a peer's memory: the one that is complete, and the one that is received.
constexpr int kPeerGenerations = 2;

struct CopiedRank {
  uint64_t host;
  int32_t world_rank;
  SnapshotShape shape;
};

Tensor bytes_of(std::byte* data, size_t count) {
  return Tensor::of(reinterpret_cast<uint8_t*>(data), {int64_t(count)});
}

size_t bytes_in_chunk(size_t total, size_t at) {
  return at < total ? std::min(kCopyChunk, total - at) : 0;
}

}  // namespace

int peer_distance(std::span<const uint64_t> hosts) {
  const int ranks = int(hosts.size());
  int best = 1, best_others = -1;
  for (int distance = 1; distance < ranks; ++distance) {
    int others = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      others += hosts[size_t(rank)] != hosts[size_t((rank + distance) % ranks)];
    }
    if (others > best_others) best = distance;
    best_others = std::max(best_others, others);
  }
  return best;
}

PeerCopies::PeerCopies(Communicator& replicas, SnapshotMemory& memory)
    : memory_(memory), comm_(split_on_host(replicas)) {
  const CopiedRank local{processes::host_identity(), int32_t(memory.owner().rank),
                         memory.local().shape()};
  std::vector<CopiedRank> all;
  std::vector<uint64_t> hosts;
  for (const auto& blob : comm_->exchange(std::as_bytes(std::span(&local, 1)), "peers' memory")) {
    CopiedRank& rank = all.emplace_back();
    std::memcpy(&rank, blob.data(), sizeof rank);
    hosts.push_back(rank.host);
    max_bytes_ = std::max(max_bytes_, rank.shape.generation_bytes());
  }
  const int distance = peer_distance(hosts), ranks = comm_->size();
  to_ = (comm_->rank() + distance) % ranks;
  from_ = (comm_->rank() + ranks - distance) % ranks;
  const CopiedRank& source = all[size_t(from_)];
  SnapshotOwner owner = memory.owner();
  owner.rank = source.world_rank;
  SnapshotShape shape = source.shape;
  shape.generations = kPeerGenerations;
  on_every_rank(*comm_, "memory of peers' snapshots", 0, [&] {
    SnapshotArea& area = memory_.peer();
    const bool is_same = area.has_owner() && area.differs(owner).empty() && area.shape() == shape;
    if (!is_same) area.reset(owner, shape);
    return std::string();
  });
  newest_ = 1 - memory_.peer().oldest({});
  first_chunk_.resize(bytes_in_chunk(shape.generation_bytes(), 0));
}

PeerCopies::~PeerCopies() {
  if (!running_.valid()) return;
  const bool failed = std::uncaught_exceptions() > 0;
  const auto state = running_.wait_for(std::chrono::seconds(failed ? 10 : 0));
  // It may wait for a rank that waits for this one's error.
  if (failed && state == std::future_status::timeout) comm_->abort("the run has ended");
  running_.wait();
}

void PeerCopies::begin(const SnapshotGeneration& generation, int index) {
  running_ =
      std::async(std::launch::async | std::launch::deferred,
                 [this, training = std::this_thread::get_id(), &generation, index] {
                   if (std::this_thread::get_id() != training) {
                     ::setpriority(PRIO_PROCESS, 0, 10);  // training has the processors first
                   }
                   const KernelThreads threads(1);
                   exchange(generation, index);
                 });
  // If no thread could be started, this one copies, as the other ranks' do.
  if (running_.wait_for(std::chrono::seconds(0)) == std::future_status::deferred) running_.wait();
}

bool PeerCopies::is_running() const {
  return running_.valid() &&
         running_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
}

void PeerCopies::end() {
  running_.get();
}

/// The other rank's header, and with it the rest of the first chunk, is stored last: until then its
/// generation is invalid.
void PeerCopies::exchange(const SnapshotGeneration& generation, int index) {
  generation.await_complete();
  const DiskDeadline longer(*comm_);  // a rank may write to its disk meanwhile
  const int target = 1 - newest_;
  SnapshotArea &local = memory_.local(), &peer = memory_.peer();
  std::byte *const source = local.generation(index), *const to = peer.generation(target);
  const size_t sent = local.shape().generation_bytes(), received = peer.shape().generation_bytes();
  peer.header(target).invalidate();
  std::vector<int64_t> send_counts(size_t(comm_->size())), recv_counts(size_t(comm_->size()));
  for (size_t at = 0; at < max_bytes_; at += kCopyChunk) {
    const size_t out = bytes_in_chunk(sent, at), in = bytes_in_chunk(received, at);
    send_counts[size_t(to_)] = int64_t(out);
    recv_counts[size_t(from_)] = int64_t(in);
    all_to_all(*comm_, bytes_of(source + std::min(at, sent), out), send_counts,
               bytes_of(at == 0 ? first_chunk_.data() : to + std::min(at, received), in),
               recv_counts);
  }
  SnapshotHeader header;
  std::memcpy(&header, first_chunk_.data(), sizeof header);
  std::memcpy(to + sizeof header, first_chunk_.data() + sizeof header,
              first_chunk_.size() - sizeof header);
  if (!header.is_valid()) return;  // the other rank's memory was damaged
  header.invalidate();
  peer.header(target) = header;
  peer.header(target).complete();
  newest_ = target;
}

}  // namespace tandem
