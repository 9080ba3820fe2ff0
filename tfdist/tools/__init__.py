"""Programs beside the library, which nothing else imports: plans, the doctor, the launcher of workers."""
