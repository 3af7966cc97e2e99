// What the transports of CPU ranks share: argument checks, the control plane (`exchange`, and with
// it barrier, require_same, allocate's and split's agreement) and the plain collectives' workspace.
// A transport derives from BaseCommunicator, implements the hooks and calls `start()` at the end of
// its constructor.
//
// `exchange` runs on put and wait over a small symmetric buffer. In round r every rank puts one
// slot to every other and waits for theirs. Slots alternate with the round's parity: a rank enters
// round r + 2 only after every other entered r + 1, hence has read round r, so two slots are enough
// and nothing is acknowledged. Every rank sees every rank's slot: all of them find the same
// mismatch, and a rank that never arrives is waited for, and named, directly.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/progress.h"
#include "comm/workspace.h"
#include "core/fork.h"
#include "tandem/communicator.h"

namespace tandem {

class BaseCommunicator : public Communicator {
 public:
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) final;
  void put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source, size_t bytes,
           int signal, uint64_t epoch) final;
  uint64_t read_signal(const SymmetricBuffer& buffer, int signal) const final;
  void wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch, const WaitSite& site) final;
  std::unique_ptr<Communicator> split(int color, int key) final;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) final;

 protected:
  using Communicator::Communicator;

  /// Collective; the arguments are known to be the same on all ranks.
  virtual std::shared_ptr<SymmetricBuffer> do_allocate(size_t bytes, int signals) = 0;
  /// The arguments of these are in range.
  virtual void do_put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                      size_t bytes, int signal, uint64_t epoch) = 0;
  /// What does not count as traffic: past an emulated link.
  virtual void do_raise(int peer, SymmetricBuffer& buffer, int signal, uint64_t epoch) {
    do_put(peer, buffer, 0, nullptr, 0, signal, epoch);
  }
  virtual uint64_t do_read_signal(const SymmetricBuffer& buffer, int signal) const = 0;
  virtual void do_wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                       const WaitSite& site) = 0;
  /// Collective: the communicator of `members`, ranks of this one in their new order, of which
  /// this rank is `members[index]`. `color` tells the new groups apart.
  virtual std::unique_ptr<Communicator> do_split(int color, const std::vector<int>& members,
                                                 int index) = 0;

  /// Collective: allocates the control buffer and the workspace.
  void start(Reach reach);
  /// A peer's memory of `buffer`, to look at for an error's text; nullptr where that is elsewhere.
  virtual std::byte* look_at(const SymmetricBuffer& buffer, int rank) const {
    return buffer.peer(rank);
  }
  /// Frees what `start` allocated, for a transport whose buffers must go before the transport.
  void stop();

  /// In a forked child nothing is waited for, sent or given back.
  const ProcessMark process_;

 private:
  void exchange_all(std::span<const std::byte> blob, std::string_view what,
                    std::vector<std::vector<std::byte>>& all);
  void exchange_round(std::span<const std::byte> piece, size_t total, std::string_view what);
  const std::byte* control_slot(int source) const;

  std::shared_ptr<SymmetricBuffer> control_;
  std::vector<std::byte> outgoing_;  // one slot per parity
  uint64_t round_ = 0;
  Progress progress_{*this, "exchange"};
};

}  // namespace tandem
