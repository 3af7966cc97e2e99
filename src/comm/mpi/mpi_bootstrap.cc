#include "comm/mpi/mpi_bootstrap.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "comm/mpi/mpi_transport.h"
#include "comm/rendezvous/launch.h"
#include "core/version.h"
#include "tandem/error.h"

namespace tandem::mpi {
namespace {

// Sets Open MPI's defaults; the user's settings are retained.
void advise_open_mpi() {
  const std::string eager = std::to_string(processes::kChunkBytes + 4096);
  for (const char* name : {"OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_rndv_eager_limit",
                           "OMPI_MCA_btl_tcp_max_send_size"}) {
    setenv(name, eager.c_str(), 0);
  }
}

/// Throws InvalidArgument if MPI's size differs from the launcher's: under the launcher of another
/// MPI than this build's, every process believes it is the only one.
void require_launched_size(int size) {
  const auto launch = launched_by_some_mpi();
  if (!launch || launch->size == size) return;
  throw InvalidArgument(
      fmt::format("{}={}: MPI says {} rank{}: expected as many (is it another MPI's launcher? this "
                  "build has {})",
                  launch->variable, launch->size, size, size == 1 ? "" : "s", kMpiVersion));
}

}  // namespace

MpiBootstrap::MpiBootstrap(processes::Engine& engine, MPI_Comm base) {
  int ready = 0, level = 0, key = 0;
  advise_open_mpi();
  MPI_Initialized(&ready);
  finalizes_mpi_ = !ready;
  if (finalizes_mpi_) {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
  } else {
    MPI_Comm_create_keyval(
        MPI_COMM_NULL_COPY_FN,
        [](MPI_Comm, int, void* leaving, void*) {
          static_cast<processes::Engine*>(leaving)->leave();
          return MPI_SUCCESS;
        },
        &key, nullptr);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, &engine);  // MPI_Finalize deletes it before anything else
  }
  MPI_Comm_dup(base, &comm_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  if (base != MPI_COMM_WORLD) return;
  try {
    require_launched_size(size_);
  } catch (const InvalidArgument&) {
    end();
    throw;
  }
}

bool MpiBootstrap::has_fabric() const {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
  return !error && devices != std::filesystem::directory_iterator();
}

std::unique_ptr<processes::Transport> MpiBootstrap::make_transport(processes::TransportSink& sink,
                                                                   processes::EventFd& event_fd) {
  return std::make_unique<MpiTransport>(comm_, sink, event_fd);
}

// Finalizes MPI after a Mismatch, for which all ranks arrive here or none does. A rank that exits
// without MPI_Finalize would kill the others before they report their errors.
void MpiBootstrap::failed(const std::exception& error) {
  if (dynamic_cast<const Mismatch*>(&error)) end();
}

void MpiBootstrap::end() {
  if (finalizes_mpi_) MPI_Finalize();
}

void MpiBootstrap::gather_bytes(std::span<const std::byte> local, std::span<std::byte> all,
                                std::string_view) {
  MPI_Allgather(local.data(), int(local.size()), MPI_BYTE, all.data(), int(local.size()), MPI_BYTE,
                comm_);
}

processes::Engine& engine(MPI_Comm base) {
  static processes::Engine world([base](processes::Engine& starting) {
    return std::make_unique<MpiBootstrap>(starting, base);
  });
  return world;
}

MPI_Comm comm_of(const processes::Engine& engine) {
  return static_cast<const MpiBootstrap&>(engine.bootstrap()).comm();
}

}  // namespace tandem::mpi
