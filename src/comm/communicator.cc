#include "tandem/communicator.h"

#include <fmt/format.h>

#include <cstdlib>
#include <optional>

#include "comm/base.h"
#include "comm/rendezvous/launch.h"
#include "comm/wait_check.h"
#include "comm/world/new_worlds.h"
#include "core/system/env.h"
#include "core/system/printable.h"

namespace tandem {
namespace {

/// Removes the next line from `rest` and returns it; nothing after the last one.
std::optional<std::string_view> take_line(std::optional<std::string_view>& rest) {
  if (!rest) return std::nullopt;
  const size_t end = rest->find('\n');
  const std::string_view line = rest->substr(0, end);
  rest = end == rest->npos ? std::nullopt : std::optional(rest->substr(end + 1));
  return line;
}

/// First lines in which two different texts differ, so that an error fits on one line however long
/// they are.
std::pair<std::string_view, std::string_view> first_difference(std::optional<std::string_view> a,
                                                               std::optional<std::string_view> b) {
  while (true) {
    const auto line_a = take_line(a), line_b = take_line(b);
    if (line_a != line_b) return {line_a.value_or("no more"), line_b.value_or("no more")};
  }
}

}  // namespace

void Communicator::require_same(std::string_view what, std::string_view value) {
  const auto blobs = exchange(std::as_bytes(std::span(value.data(), value.size())), what);
  const auto as_text = [&](size_t r) {
    return std::string_view(reinterpret_cast<const char*>(blobs[r].data()), blobs[r].size());
  };
  for (size_t r = 1; r < blobs.size(); ++r) {
    if (as_text(r) != as_text(0)) {
      const auto [first, other] = first_difference(as_text(0), as_text(r));
      throw Mismatch(
          fmt::format("{}: rank 0 has {}, rank {} has {}: expected the same on all ranks", what,
                      printable(first, 200), r, printable(other, 200)));
    }
  }
}

void Communicator::set_deadline(double seconds) {
  deadline_s_ = checked_deadline(seconds, "communicator: deadline");
}

uint64_t Communicator::bytes_sent() const {
  return workspace_ ? workspace_->bytes_sent : 0;
}

Workspace& Communicator::workspace() const {
  if (!workspace_) {
    if (const auto* base = dynamic_cast<const BaseCommunicator*>(this)) {
      const_cast<BaseCommunicator*>(base)->make_workspace();
    }
  }
  if (!workspace_) {
    throw Unsupported(fmt::format(
        "staging memory on the {} transport: expected threads, mpi or processes", transport()));
  }
  return *workspace_;
}

void set_wait_check(void (*check)()) {
  wait_check.store(check);
}

void require_mpi_under_mpirun() {
  // Without MPI in the build, each process of mpirun would be a world of its own, and all would
  // write the same output.
  const auto launch = launched_by_some_mpi();
  if (!launch || launch->size == 1 || launched_by_environment()) return;
  throw Unsupported(fmt::format("{}={}: this build has no MPI (configure with -DTANDEM_MPI=ON)",
                                launch->variable, launch->size));
}

void run_world(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  if (launched_by_mpi()) return run_mpi(options, body);
  require_mpi_under_mpirun();
  if (launched()) return run_processes(options, body);
  run_threads(options, body);
}

}  // namespace tandem
