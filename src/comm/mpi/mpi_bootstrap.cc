#include "comm/mpi/mpi_bootstrap.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "comm/mpi/mpi_transport.h"
#include "comm/processes/shared/shared_memory.h"
#include "comm/rendezvous/launch.h"
#include "core/system/env.h"
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

/// Whether Open MPI's plug-ins are in files and none of them speaks PMI-1 or PMI-2, Slurm's.
bool lacks_slurm_pmi() {
  namespace fs = std::filesystem;
  Dl_info library{};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &library) == 0) return false;
  const fs::path folder = fs::path(library.dli_fname).parent_path();
  bool has_plugins = false;
  for (const fs::path& parent : {folder, folder / "openmpi" / "lib"}) {  // the second: Debian
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(parent, error)) {
      if (!entry.path().filename().string().starts_with("openmpi")) continue;
      const auto has = [&](const char* name) { return fs::exists(entry.path() / name, error); };
      if (has("mca_pmix_s1.so") || has("mca_pmix_s2.so")) return false;
      has_plugins = has_plugins || has("mca_pmix_isolated.so");
    }
  }
  return has_plugins;
}

/// Throws Unsupported for a process of srun that Open MPI would end with pages of its own.
void require_spoken_pmi() {
  const char* const step = std::getenv("SLURM_STEP_ID");
  if (!step || !std::getenv("SLURM_NODELIST") || std::getenv("PMIX_NAMESPACE")) return;
  if (!lacks_slurm_pmi()) return;
  throw Unsupported(fmt::format(
      "SLURM_STEP_ID={} without PMIX_NAMESPACE: {} does not speak the PMI of this srun: "
      "expected srun --mpi=pmix or --mpi=none, mpirun, or tandem launch",
      step, kMpiVersion));
}

}  // namespace

MpiBootstrap::MpiBootstrap(processes::Engine& engine, MPI_Comm base) {
  int ready = 0, level = 0, key = 0;
  advise_open_mpi();
  MPI_Initialized(&ready);
  finalizes_mpi_ = !ready;
  if (finalizes_mpi_) {
    require_spoken_pmi();
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
  deadline_s_ = env().deadline_s;
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
  if (rendezvous_) rendezvous_->failed(error);
  if (dynamic_cast<const Mismatch*>(&error)) end();
}

void MpiBootstrap::end() {
  if (finalizes_mpi_) MPI_Finalize();
}

std::vector<std::byte> MpiBootstrap::gather(std::span<const std::byte> local) const {
  std::vector<std::byte> all(local.size() * size_t(size_));
  MPI_Allgather(local.data(), int(local.size()), MPI_BYTE, all.data(), int(local.size()), MPI_BYTE,
                comm_);
  return all;
}

control::Connection MpiBootstrap::connect_to_store() {
  const uint64_t host = processes::host_identity();
  uint64_t min = 0, max = 0;
  MPI_Allreduce(&host, &min, 1, MPI_UINT64_T, MPI_MIN, comm_);
  MPI_Allreduce(&host, &max, 1, MPI_UINT64_T, MPI_MAX, comm_);
  rendezvous_.emplace(control::contact_rank_zero("MPI", rank_, size_, min == max,
                                                 [this](auto local) { return gather(local); }),
                      deadline_s_);
  return rendezvous_->connect_to_store();
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
