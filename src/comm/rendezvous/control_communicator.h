// Control plane of ranks that are processes without MPI: exchange, barrier, abort and split over a
// rendezvous server in rank 0's process, to which every rank has a connection (endpoint.h,
// handshake.h). It has no symmetric memory: the transport built on it (nccl) provides that. Waiting
// at epoch 0 for a buffer of no bytes checks for an abort.
//
// A rank that never arrives is named by Timeout, one whose process ends by Aborted. Split groups
// have their own rendezvous servers, but aborts go through the world's, which reaches all ranks.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/secret.h"
#include "comm/rendezvous/server.h"
#include "comm/rendezvous/server_connection.h"
#include "core/fork.h"
#include "tandem/communicator.h"

namespace tandem::control {

class ControlCommunicator final : public Communicator {
 public:
  /// Collective. Throws InvalidArgument if ranks of several hosts have no secret, and what `join`
  /// throws: among others, Timeout naming rank 0 if it does not listen within the deadline.
  ControlCommunicator(const Launch& launch, const Secret& secret, double deadline_s);
  /// Same, but rank 0 of several ranks already listens, on `listener`.
  ControlCommunicator(const Launch& launch, const Secret& secret, Connection listener,
                      double deadline_s)
      : ControlCommunicator(launch, secret, std::move(listener), deadline_s, nullptr) {}
  ~ControlCommunicator() override;

  std::string_view transport() const override { return "control"; }
  std::string link() const override { return launch_.one_host ? "local socket" : "tcp"; }
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) override;
  void put(int, SymmetricBuffer&, size_t, const void*, size_t, int, uint64_t) override;
  void flush() override {}
  uint64_t read_signal(const SymmetricBuffer&, int) const override;
  void wait(const SymmetricBuffer&, int, uint64_t epoch, const WaitSite&) override;
  void abort(const std::string& reason) override;
  /// Sets the reason that the other ranks receive if rank 0 ends after a timeout. Ranks that wait
  /// for the same rank report it themselves, unless rank 0 has ended by then.
  void end_with(const std::string& reason) {
    if (server_) server_->set_last_words(reason);
  }
  /// The new group's rendezvous server runs on its first rank.
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override;

 private:
  /// `world`: connection of the world; null if this is the world.
  ControlCommunicator(const Launch& launch, const Secret& secret, Connection listener,
                      double deadline_s, std::shared_ptr<ServerConnection> world);
  ServerConnection::Received receive(Message& message, double seconds);

  const Launch launch_;
  const Secret secret_;
  const ProcessMark process_;
  std::optional<RendezvousServer> server_;  // only on rank 0
  std::shared_ptr<ServerConnection> connection_, world_;
  uint64_t round_ = 0;
};

}  // namespace tandem::control

namespace tandem {

/// Throws InvalidArgument if `options` ask for another number of ranks than was launched.
void check_launched(const WorldOptions& options, const Launch& launch);

/// Runs `body` on this process's rank. An error aborts the other ranks and is rethrown.
void run_control(const Launch& launch, const control::Secret& secret, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body);

}  // namespace tandem
