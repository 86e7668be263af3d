#include "faults.h"

#include <ucontext.h>

#include <cerrno>
#include <csignal>

#include "pager.h"

namespace lms {
namespace {

Pager* the_pager = nullptr;
struct sigaction former;

void on_fault(int signal, siginfo_t* info, void* context) {
    const int error = errno;
#ifdef __x86_64__
    const bool writes = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
    const bool writes = true;
#endif
    if (info->si_code > 0 && the_pager->fault(static_cast<char*>(info->si_addr), writes)) {
        errno = error;
        return;
    }
    if (info->si_code <= 0) {  // a process sent it, or a handler that was called from here
        std::signal(SIGSEGV, SIG_DFL);
        std::raise(SIGSEGV);
        return;
    }
    if ((former.sa_flags & SA_SIGINFO) != 0) {
        former.sa_sigaction(signal, info, context);
    } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
        former.sa_handler(signal);
    } else {
        sigaction(SIGSEGV, &former, nullptr);  // the access that faulted is tried again, and ends the process
    }
}

bool is_installed() {
    struct sigaction found{};
    sigaction(SIGSEGV, nullptr, &found);
    return (found.sa_flags & SA_SIGINFO) != 0 && found.sa_sigaction == on_fault;
}

}  // namespace

void take_faults(Pager* pager) {
    the_pager = pager;
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    if (!is_installed()) sigaction(SIGSEGV, &ours, &former);
}

void leave_faults() {
    if (is_installed()) sigaction(SIGSEGV, &former, nullptr);
}

}  // namespace lms
