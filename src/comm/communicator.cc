#include "tandem/communicator.h"

#include <fmt/format.h>

namespace tandem {

void Communicator::require_same(std::string_view what, std::string_view value) {
  const auto blobs = exchange(std::as_bytes(std::span(value.data(), value.size())), what);
  const auto as_text = [&](size_t r) {
    return std::string_view(reinterpret_cast<const char*>(blobs[r].data()), blobs[r].size());
  };
  for (size_t r = 1; r < blobs.size(); ++r) {
    if (as_text(r) != as_text(0)) {
      throw Mismatch(
          fmt::format("{}: rank 0 has {}, rank {} has {}: expected the same on all ranks", what,
                      as_text(0), r, as_text(r)));
    }
  }
}

Workspace& Communicator::workspace() const {
  if (!workspace_) {
    throw Unsupported(
        fmt::format("plain collectives on the {} transport: expected threads or mpi", transport()));
  }
  return *workspace_;
}

void run_world(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  launched_by_mpi() ? run_mpi(options, body) : run_threads(options, body);
}

}  // namespace tandem
