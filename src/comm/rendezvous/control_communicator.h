// The control plane of ranks that are processes without MPI: exchange, barrier, abort and split
// a hub in rank 0's process, to which every rank has a connection (endpoint.h, handshake.h). It has
// no symmetric memory: the transport that stands on it (nccl) brings its own. A buffer of no bytes
// can be waited for at epoch 0, which looks for an abort.
//
// A rank that never comes is named by Timeout, one whose process ends by Aborted. Groups that are
// split off have hubs of their own, but aborts go through the world's: it reaches all.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/rendezvous/hub.h"
#include "comm/rendezvous/launch.h"
#include "comm/rendezvous/line.h"
#include "comm/rendezvous/secret.h"
#include "core/fork.h"
#include "tandem/communicator.h"

namespace tandem::control {

class ControlCommunicator final : public Communicator {
 public:
  /// Collective. Throws InvalidArgument where ranks of several hosts have no secret, and what
  /// `join` does: Timeout naming rank 0 when it does not listen within the deadline, among others.
  ControlCommunicator(const Launch& launch, const Secret& secret, double deadline_s);
  /// The same; rank 0 of several has begun to listen, with `listener`.
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
  /// A rank that waits no longer for another, before it ends. Those who wait for the same one name
  /// it themselves, unless rank 0 is gone by then: they hear this from it.
  void end_with(const std::string& reason) {
    if (hub_) hub_->set_last_words(reason);
  }
  /// The new group's hub is with its first rank.
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override;

 private:
  /// `world`: nothing where this is the world.
  ControlCommunicator(const Launch& launch, const Secret& secret, Connection listener,
                      double deadline_s, std::shared_ptr<Line> world);
  Line::Received receive(Message& message, double seconds);

  const Launch launch_;
  const Secret secret_;
  const ProcessMark process_;
  std::optional<Hub> hub_;  // rank 0
  std::shared_ptr<Line> line_, world_;
  uint64_t round_ = 0;
};

}  // namespace tandem::control

namespace tandem {

/// Throws InvalidArgument where `options` want another count of ranks than was launched.
void check_launched(const WorldOptions& options, const Launch& launch);

/// Runs `body` on this process's rank. An error aborts the other ranks and is rethrown.
void run_control(const Launch& launch, const control::Secret& secret, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body);

}  // namespace tandem
