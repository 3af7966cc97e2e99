// Preloaded: sends SIGUSR1 to its process while libraries are initialized.
#include <unistd.h>

#include <csignal>

namespace {

__attribute__((constructor)) void send() {
  ::kill(::getpid(), SIGUSR1);  // not to this thread only, as raise
}

}  // namespace
