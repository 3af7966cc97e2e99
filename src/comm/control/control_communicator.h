// The control plane of ranks that are processes without MPI: exchange, barrier, abort and split
// over TCP, through a hub in rank 0's process. It has no symmetric memory: the transport that
// stands on it (nccl) brings its own. A buffer of no bytes can be waited for at epoch 0, which
// looks for an abort.
//
// A rank that never comes is named by Timeout, one whose process ends by Aborted. Groups that are
// split off have hubs of their own, but aborts go through the world's: it reaches all.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/control/hub.h"
#include "comm/control/launch.h"
#include "tandem/communicator.h"

namespace tandem::control {

/// This rank's connection to a hub. A world's is shared by the groups that were split from it, any
/// of which may find an abort there.
class Line {
 public:
  Line(int rank, Connection connection) : rank_(rank), connection_(std::move(connection)) {}

  int rank() const { return rank_; }
  bool open() const { return connection_.open(); }
  void send(const Header& header, std::string_view name = {}, std::span<const std::byte> blob = {});
  /// Throws Aborted for an abort. A hub that said it would end is gone.
  Connection::Received receive(Message& message, double seconds);
  /// Throws Aborted if the hub has told of one, now or before, or ended without a word; does not
  /// wait.
  void look_for_abort();
  const Connection& connection() const { return connection_; }

 private:
  Connection::Received receive_now(Message& message);

  const int rank_;
  Connection connection_;
  std::mutex sending_;  // abort comes from any thread
  std::mutex receiving_;
  std::optional<Aborted> aborted_;
  bool ended_ = false;  // the hub, as it said
};

class ControlCommunicator final : public Communicator {
 public:
  /// Collective. Throws Timeout naming rank 0 when nobody listens within the deadline.
  ControlCommunicator(const Launch& launch, double deadline_s);
  ~ControlCommunicator() override;

  std::string_view transport() const override { return "control"; }
  std::string link() const override { return "tcp"; }
  std::shared_ptr<SymmetricBuffer> allocate(size_t bytes, int signals) override;
  void put(int, SymmetricBuffer&, size_t, const void*, size_t, int, uint64_t) override;
  void flush() override {}
  uint64_t read_signal(const SymmetricBuffer&, int) const override;
  void wait(const SymmetricBuffer&, int, uint64_t epoch, const WaitSite&) override;
  void abort(const std::string& reason) override;
  /// The new group's hub is with its first rank.
  std::unique_ptr<Communicator> split(int color, int key) override;
  std::vector<std::vector<std::byte>> exchange(std::span<const std::byte> blob,
                                               std::string_view what) override;

 private:
  /// `world`: nothing where this is the world.
  ControlCommunicator(const Launch& launch, Connection listener, double deadline_s,
                      std::shared_ptr<Line> world);
  Connection::Received receive(Message& message, double seconds);

  std::optional<Hub> hub_;  // rank 0
  std::shared_ptr<Line> line_, world_;
  uint64_t round_ = 0;
};

}  // namespace tandem::control

namespace tandem {

/// Runs `body` on this process's rank. An error aborts the other ranks and is rethrown.
void run_control(const Launch& launch, const WorldOptions& options,
                 const std::function<void(Communicator&)>& body);

}  // namespace tandem
