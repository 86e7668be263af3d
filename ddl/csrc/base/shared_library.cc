#include "base/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

#include "base/status.h"

namespace ddl {

SharedLibrary::SharedLibrary(const std::vector<std::string>& names, const std::string& what, const std::string& remedy,
                             Scope scope) {
    std::string tried;
    for (const std::string& name : names) {
        handle_ = dlopen(name.c_str(), RTLD_NOW | (scope == Scope::global ? RTLD_GLOBAL : RTLD_LOCAL));
        if (handle_) {
            name_ = name;
            return;
        }
        const char* why = dlerror();
        tried += (tried.empty() ? "" : "; ") + std::string(why ? why : name);
    }
    throw Error(DDL_ERROR_UNSUPPORTED, what + " was not found (" + tried + "): " + remedy);
}

void* SharedLibrary::address_of(const char* name) const {
    void* address = dlsym(handle_, name);
    if (!address) {
        throw Error(DDL_ERROR_UNSUPPORTED, name_ + " has no function " + name +
                                               ": it is of another version than this "
                                               "library knows");
    }
    return address;
}

std::string chosen_library(const char* variable) {
    const char* chosen = std::getenv(variable);
    return chosen ? chosen : "";
}

std::string loaded_library(const std::string& prefix) {
    struct Search {
        const std::string& prefix;
        std::string found;
    } search{prefix, ""};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto* mine = static_cast<Search*>(data);
            const std::string path = info->dlpi_name;
            const std::string file = path.substr(path.rfind('/') + 1);
            if (file.rfind(mine->prefix, 0) == 0) mine->found = path;
            return mine->found.empty() ? 0 : 1;
        },
        &search);
    return search.found;
}

unsigned long long loaded_count() {
    unsigned long long count = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            *static_cast<unsigned long long*>(data) = info->dlpi_adds;
            return 1;
        },
        &count);
    return count;
}

}  // namespace ddl
